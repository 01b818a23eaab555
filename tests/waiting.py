"""How long tests wait for what must come: long enough for any machine, so that only what hangs fails."""

HANGS = 1800.0
"""Seconds after which something hangs, however busy the machine is."""

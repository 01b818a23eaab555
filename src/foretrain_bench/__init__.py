"""Micro-benchmarks of foretrain's hot paths and the command `foretrain bench`: a tool for its developers.

`foretrain` never imports this package; the command line loads `foretrain_bench.command` when `bench` is typed.
"""

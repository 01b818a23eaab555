"""Was a move worth it? Audits, probes and held-out data."""

"""Is the run well? What detects illness, what acts on it, and what only advises."""

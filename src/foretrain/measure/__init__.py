"""Is it true? Comparisons of runs and of micro-benchmarks, with intervals."""

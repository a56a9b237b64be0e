"""Programs that benchmarks run as workers."""

"""Measurements, each one command: `python -m benchmarks.<name> --json -`."""

"""Benchmarks: `python -m perf sweep --op NAME --json OUT`."""

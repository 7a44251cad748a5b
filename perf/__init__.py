"""Measurements: `python -m perf sweep | report | compare`."""

"""Experiment."""
PDL, WARM = 2, True

"""Experiment."""
PDL, WARM, GATHER = 2, True, True

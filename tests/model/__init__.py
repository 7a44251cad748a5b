"""A model of a multiprocessor, or of a cluster of them, that runs the PTX of our kernels on the host: see machine.py."""

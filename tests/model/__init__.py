# SPDX-License-Identifier: Apache-2.0
"""A model of multiprocessors that runs the PTX of our kernels on the host: see machine.py."""

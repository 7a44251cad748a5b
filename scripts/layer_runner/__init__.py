# SPDX-License-Identifier: Apache-2.0
"""What scripts/run_layer.py does between reading its arguments and printing: requests, paging, steps, checks, dump."""

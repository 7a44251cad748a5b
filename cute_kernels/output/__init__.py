# SPDX-License-Identifier: Apache-2.0
"""What follows attention: its output rotated back and quantized. The GEMM behind it is one of linear/.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
inv_rope.py            kernel
"""

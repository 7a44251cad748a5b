# SPDX-License-Identifier: Apache-2.0
"""What follows attention: its output rotated back and quantized. The GEMM behind it is one of linear/.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
call.py                calls, their arguments by name
inv_rope.py            kernel
verify_cases.py        calls that the kernels are verified with
"""

# SPDX-License-Identifier: Apache-2.0
"""RMS norms: of the latent query and the KV vector, and those of multi-token prediction.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
call.py                calls, their arguments by name
rms.py                 kernel: rows of one or two matrices
q_kv_quant.py          kernel: the same, the query quantized
verify_cases.py        calls that the kernels are verified with
"""

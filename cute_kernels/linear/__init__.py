# SPDX-License-Identifier: Apache-2.0
"""FP8 and bf16 linear layers: quantized activations, and the GEMMs that read them, grouped ones included.

ops.py                 what users call
reference.py           what it means, in torch; also the CPU implementation
scales.py              scales of 128 columns, four in a word
quantize.py            kernel: activations quantized
call.py                calls, their arguments by name
launch.py              what a GEMM op runs on a GPU: whether kernels can take a call, launch, keys of deployments
select.py              which of Hopper's kernels a GEMM takes, and how it cuts K
params.py              tensors of the kernels, and work tiles of those of blackwell/ and mma_sync/

hopper/                gemm.py: many rows; gemm_swap_ab.py: few; gemm_dual.py: an FP8 and a bf16 product in one launch
blackwell/             gemm.py: tcgen05
mma_sync/              gemm.py: every architecture from sm_80 on
verify_cases.py        calls that the kernels are verified with
"""

# SPDX-License-Identifier: Apache-2.0
"""What kernels share on the device. Nothing here knows of an op.

ptx/                   every inline PTX instruction, each with the architectures on which it is legal
entry.py               a kernel's arguments as one record
tensor.py              tensors as addresses, strides and descriptors of tensor copies
paging.py              block tables and batches of requests
barriers.py            rings of shared-memory stages (mbarriers)

wgmma.py               products of Hopper's tensor cores
umma.py                products of Blackwell's (tcgen05): operands, instructions, results
mma_sync.py            products of single warps, sm_80 and up

convert.py             number formats: bf16, e4m3, ue8m0
transforms.py          rotation of column pairs, Hadamard transform
reduce.py              reductions over lanes, in a fixed order
delays.py              random delays, for tests of orders
"""

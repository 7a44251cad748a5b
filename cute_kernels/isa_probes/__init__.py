# SPDX-License-Identifier: Apache-2.0
"""What the kernels of Blackwell take for granted about its instructions, and experiments that find out.

They are the first thing that `python -m cute_kernels verify` does on a Blackwell.

    meaning                         what the instructions do, on numpy arrays; the host model of the tests executes it
    products, copies, conversions   experiments of one to four instructions: memories in, memories out
    kernels                         the same as kernels
    check                           runs them on the GPU at hand and compares every byte with the meaning
"""

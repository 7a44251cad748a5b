# SPDX-License-Identifier: Apache-2.0
"""The compressor: projections saved in a state cache, groups of tokens closed into compressed cache entries.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
call.py                calls, their arguments by name
select.py              which kernel they run

ratio4.py              kernels of ratio 4, stored from the state cache or straight from the projections
ratio128.py            the same of ratio 128; ratio128_portable.py: where there are no clusters
epilogue.py            of both: norm, rotation, rounding, quantization, stores
latent.py              kernel: latents of V4.1
latent_store.py        kernel: entries and index keys of V4.1
save.py                kernel: projections saved
slots.py               kernel: slots of entries
verify_cases.py        calls that the kernels are verified with
"""

"""FP8 and bf16 linear layers: quantized activations, and the GEMMs that read them.

ops.py          what users call
reference.py    what it means, in torch; also the CPU implementation
hopper/         kernels with wgmma, one file each
"""

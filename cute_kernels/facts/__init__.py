"""What the kernels of Blackwell take for granted about its instructions, and experiments that find out.

meaning        what the instructions do, on numpy arrays; the host model of the tests executes the same functions
experiments    one or two instructions each: memories in, memories out
kernels        the experiments as kernels
check          runs them on the GPU at hand and compares every byte with the meaning: first of all that
               `python -m cute_kernels verify` does on a Blackwell
"""

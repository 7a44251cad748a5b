# SPDX-License-Identifier: Apache-2.0
"""CUDA streams that are nobody else's."""

from __future__ import annotations

from typing import Any

import torch


def make_stream(device_index: int) -> torch.cuda.Stream:
    """A new stream of a CUDA device, which does not wait for the default stream and is never destroyed. torch deals its
    own streams out of pools of 32, over and over, so that anyone who asks for one may get the same. It may be made
    while the current stream is being captured. RuntimeError if CUDA makes none."""
    import cuda.bindings.runtime as cuda

    def done(result: tuple[Any, ...]) -> Any:
        if result[0] != cuda.cudaError_t.cudaSuccess:
            raise RuntimeError(f"make_stream: cuda:{device_index}: {result[0].name}")
        return result[-1]

    with torch.cuda.device(device_index):
        # a thread without a context would make it on the first device, whatever torch's current one is
        done(cuda.cudaSetDevice(device_index))
        handle = done(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    return torch.cuda.ExternalStream(int(handle), device=device_index)

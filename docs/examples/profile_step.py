# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: every op of it with the implementation that ran, and on a GPU every launch.

    python docs/examples/profile_step.py                  # on a CPU
    python docs/examples/profile_step.py --device cuda    # and the profiler's list of kernels

For Nsight Systems, CUTE_KERNELS_NVTX=1 puts a range around every op. CUTE_KERNELS_LOG=debug names the kernels of every
op's first call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from decode_loop import Engine

from cute_kernels.layers import PRESETS
from cute_kernels.runtime.record import record_calls


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    config = PRESETS["v4-flash"].reduced()
    engine = Engine(config, (2,), 2, args.device)
    engine.prefill(torch.randn(40, config.hidden_size).bfloat16().to(args.device), (30, 10))
    hidden = torch.randn(2, config.hidden_size).bfloat16().to(args.device)
    engine.forward(hidden, engine.next_step())  # what is set up at the first step is not profiled

    # inside, every op is waited for: right for whose time it is, not for what a step takes
    with record_calls() as recording:
        engine.forward(hidden, engine.next_step())
    for call in recording.calls:
        print(f"{call.op:50} {call.implementation:9} {1e6 * call.seconds:9.1f} us {call.cost.bytes:9} bytes")

    if args.device == "cuda":
        metadata = engine.next_step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.forward(hidden, metadata)
            torch.cuda.synchronize()
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=60))
    else:
        print("the profiler's list of kernels is skipped: there is no GPU in this run")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Step metadata on a GPU: against the CPU's, with the numbers of many steps on their way at once, in graphs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import clone_arguments, examples_of, raw_memory
from layers import PRESETS, BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder
from layers.metadata import RING_SLOTS
from tests.layers.engine import KINDS
from tests.layers.test_metadata import CASES, CONFIG, MAX_LEN, MAX_TOKENS, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def on_gpu(tables: BlockTables) -> BlockTables:
    return BlockTables(**{name: None if t is None else t.cuda() for name, t in vars(tables).items()})


def same(got: DeepseekV4Metadata, want: DeepseekV4Metadata) -> None:
    for name in (field.name for field in fields(want) if field.compare):
        mine, value = getattr(got, name), getattr(want, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine.cpu(), value), name
            assert mine.dtype == value.dtype, name
        else:
            assert mine == value, name


def builders(**options: Any) -> tuple[DeepseekV4MetadataBuilder, DeepseekV4MetadataBuilder]:
    sizes = CONFIG, MAX_TOKENS, MAX_LEN
    return DeepseekV4MetadataBuilder(*sizes, "cuda", **options), DeepseekV4MetadataBuilder(*sizes)


@pytest.mark.parametrize("use_pdl", [False, True])
def test_every_field_of_every_kind(use_pdl: bool) -> None:
    """Of builds of one kind and of all kinds, twice: the second time by the launch that was kept."""
    gpu, cpu = builders(use_pdl=use_pdl)
    for number, case in enumerate(CASES):
        steps = [case(ratio) for ratio in KINDS]
        for step in steps:
            step.seed = number
        tables = {step.ratio: step.tables() for step in steps}
        given = {ratio: on_gpu(of_kind) for ratio, of_kind in tables.items()}
        numbers = steps[0].query_lens, steps[0].seq_lens
        want = cpu.build_step(*numbers, tables, steps[0].num_decodes)
        for _ in range(2):
            got = gpu.build_step(*numbers, given, steps[0].num_decodes)
            for ratio in KINDS:
                same(got[ratio], want[ratio])
                one = gpu.build(ratio, *numbers, given[ratio], steps[0].num_decodes)
                same(one, cpu.build(ratio, *numbers, tables[ratio], steps[0].num_decodes))


def test_lengths_and_restarts_on_the_device() -> None:
    gpu, cpu = builders()
    step = Step(4, [3, 3, 20], [259, 130, 150], 2)
    lens, restart = torch.tensor([259, 130, 150], dtype=torch.int32), torch.tensor([5, 6, 7], dtype=torch.int32)
    given: Any = (4, [3, 3, 20], [262, 133, 150])
    want = cpu.build(*given, step.tables(), 2, seq_lens_device=lens, min_restart=restart)
    tables = on_gpu(step.tables())
    first = gpu.build(*given, tables, 2, seq_lens_device=lens.cuda(), min_restart=restart.cuda())
    same(first, want)
    # from where the results themselves lie
    same(gpu.build(*given, tables, 2, seq_lens_device=first.seq_lens, min_restart=first.min_restart), want)
    same(gpu.build(*given, tables, 2, seq_lens_device=lens.cuda(), min_restart=[5, 6, 7]), want)


def test_steps_queue_up_behind_a_busy_gpu() -> None:
    """The host is many steps ahead: no step sees the numbers of a later one."""
    gpu, _ = builders()
    tables = BlockTables(torch.arange(64, dtype=torch.int32, device="cuda").view(1, 64))
    seen = []
    gpu.build(1, [1], [1], tables, 1)
    torch.cuda.synchronize()
    for step in range(5 * RING_SLOTS):
        torch.cuda._sleep(2_000_000)
        seen.append(gpu.build(1, [1], [step + 1], tables, 1).positions.clone())
    assert torch.cat(seen).tolist() == list(range(5 * RING_SLOTS))


def test_a_graph_sees_what_the_next_step_builds() -> None:
    gpu, cpu = builders()
    steps = [Step(128, [1, 1, 1], seqs, 3, seed=9) for seqs in ([1000, 129, 1], [1001, 130, 2], [900, 0, 500])]
    tables = on_gpu(BlockTables(*(torch.randint(0, 900, (3, 700)).int() for _ in range(3))))
    host = BlockTables(*(t.cpu() for t in vars(tables).values()))
    metadata = gpu.build(128, [1] * 3, [1024] * 3, tables, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = {n: v.clone() for n, v in vars(metadata).items() if isinstance(v, torch.Tensor)}
    for step in steps:
        lens = torch.tensor(step.seq_lens, dtype=torch.int32)
        gpu.build(128, [1] * 3, [1024] * 3, tables, 3, seq_lens_device=lens.cuda())
        graph.replay()
        want = cpu.build(128, [1] * 3, [1024] * 3, host, 3, seq_lens_device=lens)
        for name, value in copies.items():
            assert torch.equal(value.cpu(), getattr(want, name)), name


def test_launched_as_a_dependent() -> None:
    """Behind kernels that write what it reads, and the same bits."""
    op = all_ops()["build_step_metadata"]
    found = examples_of(op)
    assert found is not None
    for example in found():
        plain, gpu = (clone_arguments(example.args, torch.device("cuda")) for _ in range(2))
        op.overload(*plain[:-1], False)
        upload = gpu[0].clone()
        for _ in range(20):
            gpu[0].zero_()
            gpu[0].copy_(upload)
            op.overload(*gpu[:-1], True)
            for mine, other in zip(gpu, plain, strict=True):
                if isinstance(mine, torch.Tensor):
                    assert torch.equal(raw_memory(mine), raw_memory(other))


def test_launches_of_a_step() -> None:
    """One copy and one kernel for all kinds."""
    config = PRESETS["v4-flash"]
    builder = DeepseekV4MetadataBuilder(config, 64, 8192, "cuda")
    tables = {
        ratio: BlockTables(
            *(torch.zeros(8, 2048, dtype=torch.int32, device="cuda") for _ in range(3 if ratio > 1 else 1))
        )
        for ratio in KINDS
    }
    builder.build_step([1] * 8, [100] * 8, tables, 8)
    torch.cuda.synchronize()
    for step in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            builder.build_step([1] * 8, [101 + step] * 8, tables, 8)
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert sorted("Memcpy" in name for name in names) == [False, True], names

# SPDX-License-Identifier: Apache-2.0
"""The GEMM kernel for many rows, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import select
from cute_kernels.linear.hopper.gemm import REGISTERS, SCALED_CHUNKS, GemmKey
from cute_kernels.runtime.arch import SMEM_BYTES
from tests.compile.reports import RESERVED, compile_report
from tests.compile.sampling import of_run

KEYS = select.many_rows_keys("bf16")
SPLITS = [key for key in select.many_rows_keys("bf16", may_split=True) if key not in KEYS]
"""With K cut, or of CTAs that share a multiprocessor."""
SQUARES = [tile.key for tile in select.SQUARES_TILES]
BF16 = [key for output in ("fp32", "bf16") for key in select.many_bf16_rows_keys(output)]
"""Of bf16 operands."""


def name(key: GemmKey) -> str:
    return f"{key.operands}_{key.output}_{key.rows}x{key.columns}_s{key.stages}k{key.splits}{'_squares' * key.squares}"


OUTPUTS = [
    select.with_output(key, output)
    for output in ("fp32", "e4m3")
    for key in [*KEYS, *SPLITS]
    if key.columns == 128 and select.has_result(key, output)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "key" in metafunc.fixturenames:
        keys = of_run([*KEYS, *SPLITS, *OUTPUTS, *SQUARES, *BF16], metafunc.config)
        metafunc.parametrize("key", keys, ids=name)


def test_the_assembler_waits_for_no_product_on_its_own(key: GemmKey) -> None:
    """Where it cannot follow the accumulators, it waits after each instruction."""
    report = compile_report(key)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    order = report.in_sass.findall(r"[QH]GMMA|WARPGROUP\.DEPBAR")
    product = "QGMMA" if key.operands == "e4m3" else "HGMMA"
    multiply, wait = [product] * 4, ["WARPGROUP.DEPBAR"]
    alone = multiply + wait
    if key.operands == "bf16":
        # in the loop, with chunks under way where it goes round, and behind it
        assert order == multiply + wait * 2
        return
    several: list[str] = []
    for size in range(key.unrolled, 0, -SCALED_CHUNKS):
        before, behind = [], multiply
        if key.interleaved:
            # the oldest is waited for between the halves of a product
            before, behind = multiply[:2], multiply[2:]
        full = key.depth - 1 if key.interleaved else key.depth
        together = multiply * full + (before + wait + behind) * (size - full) + wait * full
        several += together if key.depth > 1 else alone * size
    assert order == several + alone


MOVED = {(64, 64, 4, False): 104, (128, 96, 2, True): 300}
"""Rows, columns, depth and whether interleaved, of kernels some of whose places in shared memory are in registers of
each thread."""


def test_places_of_operands_are_in_registers_of_the_warp(key: GemmKey) -> None:
    """Moved there between products, they keep the tensor cores waiting."""
    report = compile_report(key)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    assert len(report.in_sass.findall("R2UR")) <= MOVED.get((key.rows, key.columns, key.depth, key.interleaved), 4)


def registers_of_roles(sass: str) -> list[int]:
    """The highest number of a register in the producer's code and in the consumers'."""
    producer, consumer = re.split(r"USETMAXREG\.TRY_ALLOC", sass.split("USETMAXREG.DEALLOC")[1])[:2]
    # what the consumers compute before they have their registers, behind the producer's last jump, counts as theirs
    producer, _, start = producer.rpartition(" BRA ")
    return [max(int(n) for n in re.findall(r"\bR(\d+)\b", code)) for code in (producer, start + consumer)]


def test_roles_stay_within_their_registers(key: GemmKey) -> None:
    report = compile_report(key)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    if key.warpgroups == 1:
        return
    highest = report.in_sass.ask(registers_of_roles)
    assert all(number < most for number, most in zip(highest, REGISTERS[key.warpgroups], strict=True))


@pytest.mark.parametrize(("rows", "groups", "outputs"), [(1, 1, 8), (64, 8, 1024), (129, 3, 136), (10**6, 8, 1024)])
def test_ctas(rows: int, groups: int, outputs: int) -> None:
    key, ctas = select.many_rows("bf16", rows, groups, outputs, 32)
    tiles = groups * -(-rows // key.rows) * -(-outputs // key.columns)
    assert ctas == min(select.MULTIPROCESSORS, tiles)


@pytest.mark.parametrize(("outputs", "k", "staged"), [(32768, 1024, True), (4096, 8192, False), (7168, 16384, False)])
def test_results_of_long_sums_are_stored_directly(outputs: int, k: int, staged: bool) -> None:
    for rows in (1024, 1838, 4096):
        key, _ = select.many_rows("bf16", rows, 1, outputs, k // 128, may_split=True)
        assert (key.rows, key.columns, key.staged) == (128, 128, staged)


def test_no_kernel_is_idle() -> None:
    gemms = {
        gemm
        for config in MODELS.values()
        for tp in (1, 8)
        for gemm in select.layer_gemms(config, tp)
        if gemm[:2] == ("e4m3", "bf16")
    }
    chosen = {
        select.many_rows("bf16", rows, groups, outputs, k // 128)[0]
        for _, _, groups, outputs, k in gemms
        for rows in [*range(1, 1000, 21), *range(1000, 9000, 61)]
    }
    assert chosen == set(KEYS)


def test_pairs_of_ctas_fit_a_multiprocessor() -> None:
    memory = SMEM_BYTES[select.HOPPER] + 1024  # of a multiprocessor; each CTA takes 1024 for the system
    for key, small in select.CO_RESIDENT.items():
        for output in ("bf16", "fp32"):
            report = compile_report(select.with_output(small, output))
            assert 2 * (report.smem + RESERVED) <= memory
            assert 2 * key.threads * report.registers <= 65536
        # the same results, bit for bit
        assert replace(small, stages=key.stages, depth=key.depth) == key


def test_no_kernel_of_bf16_operands_is_idle() -> None:
    gemms = {gemm for config in MODELS.values() for gemm in select.layer_gemms(config, 1) if gemm[0] == "bf16"}
    # as wo_b of V4.1, whose weights are all bf16, and as no linear of a layer
    gemms |= {("bf16", "fp32", 1, 5120, 8192), ("bf16", "fp32", 1, 10560, 4096)}
    chosen = {
        select.many_bf16_rows(output, rows, outputs, k // 64)[0]
        for _, output, _, outputs, k in gemms
        for rows in range(33, 4096, 31)
    }
    assert chosen == set(select.many_bf16_rows_keys("fp32"))


def test_an_e4m3_result_has_tiles_of_whole_scale_blocks() -> None:
    for rows in range(1, 9000, 61):
        key, _ = select.many_rows("e4m3", rows, 8, 1024, 32)
        assert (key.output, key.columns) == ("e4m3", 128)

# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a deployment needs, cross-compiled: no spills, shared memory that fits, the right instructions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from cute_kernels import support
from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.runtime.report import INSTRUCTIONS, Facts, find_instructions, make_report, problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.indexer.mma_sync.logits import PortableLogitsKey
from cute_kernels.linear.blackwell.gemm import BlackwellGemmKey
from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from cute_kernels.sparse_mla.blackwell.prefill import BlackwellPrefillKey
from cute_kernels.sparse_mla.mma_sync.decode import PortableDecodeKey
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import SmallHeadsDecodeKey
from cute_kernels.sparse_mla.mma_sync.prefill import PortableKey
from tests.compile import test_code
from tests.compile.reports import compile_report
from tests.compile.sampling import all_pairs, by_kind, pairs
from tests.compile.test_code import HOPPER

LIKE_ANOTHER = ("sm_89", "sm_103a")
"""Architectures with few kernels or variants that another one, sm_120a or sm_100a, has not: one deployment will do."""

DEPLOYMENTS = [
    (arch, model, tp)
    for arch, model, tp in itertools.product(support.ARCHS, sorted(MODELS), (1, 8))
    if arch not in LIKE_ANOTHER or (model, tp) == ("v4-flash", 1)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "deployed" in metafunc.fixturenames:
        keys = deployed_keys(metafunc.config.getoption("--every-kernel"))
        metafunc.parametrize("deployed", keys, ids=[key.identity for key in keys])


def deployed_keys(every: bool) -> list[KernelKey]:
    """Keys of all deployments, but for those that test_code.py has anyway. Not `every`: a sample of each kernel's."""
    keys: dict[KernelKey, None] = {}
    for arch, model, tp in DEPLOYMENTS:
        keys.update((key, None) for key in deployment_keys(MODELS[model], tp, arch) if not is_left_out(key))
    return [key for key in keys if key not in test_code.TABLE] if every else sample(keys, test_code.TABLE)


def test_deployed_code(deployed: KernelKey) -> None:
    report = compile_report(deployed)
    assert problems(deployed, report) == []
    says_so = "barrier.cluster" in deployed.instructions
    assert says_so == ("barrier.cluster" in report.instructions), "tests/runtime/test_verify.py goes by what keys say"


def sample(keys: Iterable[KernelKey], known: Iterable[KernelKey]) -> list[KernelKey]:
    """Of each kernel and architecture, as many keys as have, with the known ones, every pair of values that two fields
    of any key have. Of kernels that only move and convert bytes, which have one source for all architectures, those are
    sm_90a's; of the others the last, unless one is known."""
    of_table = by_kind(known)
    chosen: list[KernelKey] = []
    for (name, arch), of_kind in by_kind(keys).items():
        has_mma = any("mma" in instruction for key in of_kind for instruction in key.instructions)
        there = of_table.get((name, arch), [])
        if has_mma or arch == HOPPER:
            chosen += all_pairs(of_kind, there)
        else:
            chosen += [] if there else of_kind[-1:]
    return chosen


def test_table_and_sample_have_every_kernel() -> None:
    for arch in support.ARCHS:
        keys = deployment_keys(MODELS["v4-flash"], 1, arch)
        chosen = sample(keys, test_code.TABLE)
        assert len(chosen) < len(keys)
        assert not set(chosen) & set(test_code.TABLE)
        there = [*chosen, *(key for key in test_code.TABLE if key.arch == arch)]
        assert {key.kernel_name for key in keys} <= {key.kernel_name for key in there}
        if arch == HOPPER:
            for name in {key.kernel_name for key in keys}:
                of_name, some = ([key for key in part if key.kernel_name == name] for part in (keys, there))
                assert set().union(*map(pairs, some)) >= set().union(*map(pairs, of_name))


def is_left_out(key: KernelKey) -> bool:
    """The portable kernels, that for few heads and Blackwell's own, whose keys take longest: test_code.py,
    test_decode_sm100.py, test_decode_pair_sm100.py, test_gemm_blackwell.py and test_prefill_sm100.py have samples of
    them. test_logits_sm100.py has samples of Blackwell's scores, which sm_103a compiles as sm_100a does."""
    if isinstance(key, PortableKey | BlackwellDecodeKey | BlackwellPrefillKey):
        return True
    if isinstance(key, PortableGemmKey | BlackwellGemmKey):
        return True
    if isinstance(key, PortableLogitsKey):
        return key.paged
    if isinstance(key, BlackwellLogitsKey):
        return key.arch != "sm_100a" or key.rows in (2, 3)
    if isinstance(key, (PortableDecodeKey, SmallHeadsDecodeKey)):
        return (key.second, key.out_fp32) != ("listed", False)
    return False


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_kernels_declare_what_makes_them_fast(arch: str) -> None:
    for key in deployment_keys(MODELS["v4-flash"], 1, arch):
        assert key.instructions, f"{key}: declares no instructions"


# ---- the inspection itself -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key(KernelKey):
    kernel_name: ClassVar[str] = "tests.deployments"
    smem: int = 0
    wanted: tuple[str, ...] = ()

    @property
    def smem_bytes(self) -> int:
        return self.smem

    @property
    def instructions(self) -> tuple[str, ...]:
        return self.wanted


CLEAN = Facts(32, 0, 0, 0, 0, {"wgmma": 4, "cp.async": 2}, 0.1)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (CLEAN, []),
        (replace(CLEAN, stack=8), []),
        (replace(CLEAN, spill_stores=4, spill_loads=8), ["spills: 4 bytes stored, 8 loaded"]),
        (replace(CLEAN, spill_loads=8), ["spills: 0 bytes stored, 8 loaded"]),
        (replace(CLEAN, smem=SMEM_BYTES["sm_90a"]), []),
        (replace(CLEAN, smem=SMEM_BYTES["sm_90a"] + 1), ["shared memory: 232449 bytes, sm_90a has 232448"]),
        (replace(CLEAN, instructions={"cp.async": 2}), ["missing instructions: wgmma"]),
    ],
)
def test_problems(facts: Facts, why: list[str]) -> None:
    assert problems(Key("sm_90a", wanted=("wgmma", "cp.async")), facts) == why
    assert Facts.from_json(facts.to_json()) == facts


def test_an_instruction_that_has_no_name_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"instructions: expected names among .*wgmma.*got .'hgmma'"):
        problems(Key("sm_90a", wanted=("hgmma",)), CLEAN)


REMARKS = """
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers
"""


def test_the_largest_figure_of_several_functions_counts() -> None:
    report = make_report(Key("sm_90a", smem=4096), REMARKS, "", b"", 0.5)
    assert (report.registers, report.stack, report.spill_stores, report.spill_loads) == (168, 16, 8, 4)
    assert report.smem == 4096 + 1024
    with pytest.raises(RuntimeError, match="reported no register usage"):
        make_report(Key("sm_90a"), "nothing", "", b"", 0.5)


PTX = {
    "wgmma": "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}",
    "tcgen05.mma": "tcgen05.mma.cta_group::2.kind::f8f6f4 [%r1], %rd1",
    "tcgen05.cp": "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
    "tcgen05.ld": "tcgen05.ld.sync.aligned.32x32b.x64.b32 {%r1}, [%r2];",
    "mma.sync": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}",
    "tma.gather4": "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r1]",
    "tma.load": "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1]",
    "tma.store": "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1]",
    "bulk.load": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1]",
    "bulk.store": "cp.async.bulk.global.shared::cta.bulk_group [%rd1]",
    "cp.async": "cp.async.cg.shared.global [%r1], [%rd1], 16;",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1]",
    "ld.global.128": "ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {%r1}",
    "ld.global.64": "ld.global.nc.v2.u32 {%r1}",
    "st.global.128": "st.global.v4.b32 [%rd1]",
    "st.global.64": "st.global.L1::no_allocate.v2.f32 [%rd1]",
    "st.async": "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1]",
    "cvt.e4m3": "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
    "cvt.e2m1": "cvt.rn.satfinite.e2m1x2.f32 %rs1, %f1, %f2;",
    "ex2": "ex2.approx.ftz.f32 %f1, %f2;",
    "atomic": "atom.global.add.u32 %r1, [%rd1], 1;",
    "barrier.cluster": "barrier.cluster.wait.acquire.aligned;",
    "mbarrier": "mbarrier.try_wait.parity.shared::cta.b64 p, [%r1]",
    "setmaxnreg": "setmaxnreg.inc.sync.aligned.u32 232;",
    "griddepcontrol": "griddepcontrol.wait;",
}


@pytest.mark.parametrize("name", list(INSTRUCTIONS))
def test_each_family_finds_its_instruction_and_no_other(name: str) -> None:
    assert find_instructions(f"\t{PTX[name]}\n\t@%p1 {PTX[name]}\n") == {name: 2}


@pytest.mark.parametrize(
    "other",
    [
        "ld.shared.v4.b32 {%r1}", "ld.param.v2.b32 {%r1}", "st.shared.v4.b32 [%r1]", "ld.global.b32 %r1, [%rd1];",
        "cp.async.bulk.commit_group;", "cp.async.wait_group 0;", "cp.async.bulk.prefetch.L2.global [%rd1], 64;",
        "cvt.rn.bf16x2.f32 %r1, %f1, %f2;", "wgmma.fence.sync.aligned;", "tcgen05.alloc.cta_group::1 [%r1], 64;",
        "mbarrier.init.shared::cta.b64 [%r1], 1;", "griddepcontrol.launch_dependents;",
        "barrier.cluster.arrive.release.aligned;",
    ],
)  # fmt: skip
def test_what_is_in_no_family(other: str) -> None:
    assert find_instructions(f"\t{other}\n") == {}

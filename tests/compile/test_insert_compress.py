# SPDX-License-Identifier: Apache-2.0
"""The kernels of everything between the first GEMMs and the scores or attention, compiled for every architecture they
claim."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.insert_compress import insert_compress
from cute_kernels.insert_compress.insert_compress_index import deployment_keys
from cute_kernels.models import MODELS
from tests.compile.reports import compile_report


def test_deployments() -> None:
    keys = deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
    assert len(set(keys)) == len(keys) == 8
    assert len(deployment_keys(MODELS["v4-flash"], 1, "sm_80")) == len(keys)


def test_ratio_128_reads_the_step_before_it_waits() -> None:
    """Angles of queries and keys are loaded ahead of the wait, and their rows behind it."""
    sass = compile_report(insert_compress.keys_of("sm_90a")[0]).in_sass
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    order = sass.findall(r"ACQBULK|LDG\.E(?:\.NA)?\.(?:128|64)|EXIT")
    waits = [i for i, word in enumerate(order) if word == "ACQBULK"]
    assert len(waits) == 4
    # that of the entries comes first; that of keys which are not there has no loads behind it
    loads = [i for i in waits[1:] if order[i + 1] != "EXIT"]
    assert len(loads) == 2
    for i in loads:
        assert order[i - 2 : i] == ["LDG.E.128"] * 2
        assert [word.replace(".NA", "") for word in order[i + 1 : i + 3]] == ["LDG.E.128"] * 2


def test_ratio_128_deployments() -> None:
    keys = insert_compress.deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
    assert len(set(keys)) == len(keys) == 2
    assert insert_compress.deployment_keys(MODELS["v4-flash"], 1, "sm_89") == []

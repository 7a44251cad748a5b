# SPDX-License-Identifier: Apache-2.0
"""What docs/ says about variables and formats holds, and links in all pages lead somewhere."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import support
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime import cache
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.report import Facts
from layers.engine import deepseek_v4_attention
from tests.contract import public
from tests.runtime.test_planned_mistakes import PLANNED

ROOT = Path(__file__).parent.parent
ENVIRONMENT = (ROOT / "docs/environment.md").read_text()
PAGES = [ROOT / "README.md", *(page for at in ("docs", "perf") for page in sorted((ROOT / at).rglob("*.md")))]
PACKAGES = (ROOT / "cute_kernels").glob("*/reference.py")
CACHE = (ROOT / "docs/kernel_cache.md").read_text()


def test_every_variable_is_explained() -> None:
    used = set()
    for folder in ("cute_kernels", "layers", "perf", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"\"(CUTE_KERNELS_[A-Z]+(?:_[A-Z]+)*)\"", path.read_text()))
    assert used == set(re.findall(r"^\| `(CUTE_KERNELS_\w+)` \|", ENVIRONMENT, re.M))
    assert len(used) >= 5


def test_the_cache_format_is_described() -> None:
    assert f"Format {cache.FORMAT} " in CACHE
    assert f"/v{cache.FORMAT}/" in CACHE
    for name in cache.environment() if _has_dsl() else ():
        assert f"`{name}`" in CACHE
    for name in vars(Facts(0, 0, 0, 0, 0, {}, 0.0)):
        assert name in CACHE


def test_the_support_table_is_that_of_the_package() -> None:
    ops = list(all_ops())
    assert support.markdown(ops) in (ROOT / "docs/support.md").read_text()
    assert support.exceptions(ops) in (ROOT / "README.md").read_text()


def test_every_measured_cell_has_its_record() -> None:
    for record in support.RECORDS.values():
        assert (ROOT / "perf/results" / record).is_file()


def test_the_readme_op_example_runs() -> None:
    """On the CPU instead of a GPU."""
    readme = (ROOT / "README.md").read_text()
    block = readme[readme.index("    import torch, cute_kernels\n") :]
    lines = block[: block.index("\nEach op's docstring")].replace("cuda", "cpu").splitlines()
    scope: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in lines), scope)
    stored = FP8_DS_MLA.read(scope["cache"], 64, scope["slots"]).float()
    assert ((stored - scope["k"].float()).norm() / scope["k"].float().norm()) < 0.05
    scores = scope["q"][1, 0].float() @ stored[:3].T * 512**-0.5
    want = torch.softmax(scores, -1) @ stored[:3]
    assert torch.allclose(scope["out"][1, 0].float(), want, atol=0.02)
    assert torch.allclose(scope["lse"][1, :, 0], torch.logsumexp(scores, -1), atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(("page", "behind"), [("README.md", "Metadata is built"), ("docs/v41.md", "`scripts/quick")])
def test_layer_examples_run(page: str, behind: str) -> None:
    text = (ROOT / page).read_text()
    block = text[text.index("    import torch\n    from cute_kernels.layers import") :]
    lines = block[: block.index(f"\n{behind}")].splitlines()
    scope: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in lines if line.startswith("    ")), scope)
    shapes = {"out": (200, scope["config"].hidden_size), "drafted": (5, scope["config"].hidden_size)}
    for name in ("out", "drafted")[: 1 + (page == "docs/v41.md")]:
        assert scope[name].shape == shapes[name]
        assert scope[name].isfinite().all()


def test_the_compatibility_table_is_that_of_the_records() -> None:
    fields = ("gpu", "driver", "torch", "python", "dsl", "tvm_ffi")
    records = [json.loads(path.read_text()) for path in (ROOT / "perf/results").rglob("*.json")]
    rows = {"| " + " | ".join(record[name] for name in fields) + " |" for record in records}
    assert rows == set(re.findall(r"^\| NVIDIA .*\|$", (ROOT / "docs/compatibility.md").read_text(), re.M))


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as hosts make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", page.read_text())):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" not in target and (not file.exists() or (anchor and anchor not in anchors(file.read_text()))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b, c\n[1](#a-b-c) [2](page.md#a-b-c) [3](none.md) [4](#a-b) [5](page.md) `[6](none.md)`\n")
    assert broken_links(page) == ["none.md", "#a-b"]


def test_schemas_are_those_of_the_ops() -> None:
    found = re.findall(r"`(\w+)(\((?:Tensor|SymInt)[^`]*-> \(\))`", (ROOT / "docs/ops.md").read_text())
    schemas = {name: str(op.overload._schema) for name, op in all_ops().items()}
    schemas[deepseek_v4_attention.__name__] = str(torch.ops.cute_kernels.deepseek_v4_attention.default._schema)
    for name, written in found:
        assert schemas[name] == f"cute_kernels::{name}{' '.join(written.split())}", name
    assert len(found) > 15


def test_reliability_counts_all_ops() -> None:
    """In the rows that are of this commit."""
    page = (ROOT / "docs/reliability.md").read_text()
    assert re.findall(r"\| (\d+) (?:ops|functions), (?:\d+ calls each|all but)", page) == [
        str(len(found)) for found in (all_ops(), public.functions(), PLANNED, all_ops())
    ]


def test_lines_are_short() -> None:
    """But for tables and headings, which Markdown wants in one line."""
    pages = [page for page in PAGES if page.parent != ROOT / "perf"]
    lines = [(page.name, line) for page in pages for line in page.read_text().splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 120 and line[0] not in "|#"] == []


def test_the_architecture_page_names_what_is_there() -> None:
    """Files behind its links have the classes, functions and constants named beside them."""
    page = ROOT / "docs/architecture.md"
    named = re.findall(r"\]\(([^)\s#]+\.py)\): ((?:`\w+`(?:, )?)+)", page.read_text())
    assert len(named) > 25
    for target, names in named:
        source = (page.parent / target).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *(?:def|class) {name}\b|^{name}\b", source, re.M), (target, name)


@pytest.mark.parametrize("package", [*sorted(path.parent.name for path in PACKAGES), "runtime", "dsl"])
def test_the_map_of_a_folder_names_its_modules(package: str) -> None:
    folder = ROOT / "cute_kernels" / package
    shown = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    inside = ("*.py", "hopper/*.py", "blackwell/*.py", "mma_sync/*.py")
    modules = {path.name for pattern in inside for path in folder.glob(pattern)} - {"__init__.py"}
    named = set(re.findall(r"\w+\.py", shown))
    assert modules <= named
    assert named <= {path.name for path in (ROOT / "cute_kernels").rglob("*.py")}


def _has_dsl() -> bool:
    import importlib.util

    return importlib.util.find_spec("cutlass") is not None

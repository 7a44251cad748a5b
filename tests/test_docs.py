"""What docs/ says about variables and formats holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cute_kernels import support
from cute_kernels.runtime import cache
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.report import Facts

ROOT = Path(__file__).parent.parent
ENVIRONMENT = (ROOT / "docs/environment.md").read_text()
CACHE = (ROOT / "docs/cache.md").read_text()


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


def test_the_readme_has_the_support_table_of_the_package() -> None:
    assert support.markdown(list(all_ops())) in (ROOT / "README.md").read_text()


def test_every_measured_cell_has_its_record() -> None:
    for record in support.RECORDS.values():
        assert (ROOT / "perf/results" / record).is_file()


def test_the_readme_layer_example_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme[readme.index("    import torch\n    from layers import") :]
    lines = block[: block.index("\nMetadata is built")].splitlines()
    scope: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in lines), scope)
    assert scope["out"].shape == (200, scope["config"].hidden_size)
    assert scope["out"].isfinite().all()


def _has_dsl() -> bool:
    import importlib.util

    return importlib.util.find_spec("cutlass") is not None

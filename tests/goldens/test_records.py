# SPDX-License-Identifier: Apache-2.0
"""The files of kept calls: small, with their source, and tensors come back as they were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.compat.agreement import same_values
from tests.goldens import records
from tests.helpers import raw_bytes

FILES = sorted(records.FOLDER.glob("*.npz"))


def test_files_are_small() -> None:
    sizes = [path.stat().st_size for path in FILES]
    assert max(sizes) < 100_000
    assert sum(sizes) < 1_000_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_say_whose_code_made_them(path: Path) -> None:
    file = records.load(path.stem)
    assert set(file.about) >= {"project", "license"}
    assert file.cases
    assert all(case.changed or case.result is not None for case in file.cases.values())


def test_what_is_saved_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.arange(60, dtype=torch.uint8).as_strided((3, 4, 2), (16, 2, 1), 4)
    arguments = {
        "pool": pool,
        "codes": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 3).t(),
        "empty": torch.zeros(2, 0),
        "pair": (torch.tensor([1.5]).bfloat16(), None),
        "metadata": SimpleNamespace(slots=torch.tensor([2**40, -1])),
        "dtype": torch.float32,
        "number": 0.5,
        "sizes": [1, 128],
    }
    case = records.call(lambda pool, **rest: pool[1].add_(1), arguments)
    assert case.changed.keys() == {"pool"}
    assert torch.equal(raw_bytes(pool), torch.arange(60, dtype=torch.uint8))
    records.save(tmp_path / "some.npz", {"project": "none"}, {"a": case, "b": case})
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    file = records.load("some")
    assert (file.about, set(file.cases)) == ({"project": "none"}, {"a", "b"})
    same_values(vars(file.cases["b"]), vars(case))
    back = file.cases["b"].arguments
    assert [back[name] for name in ("dtype", "number", "sizes")] == [torch.float32, 0.5, [1, 128]]
    assert isinstance(back["pair"], tuple)
    result, after = file.cases["a"].replay(lambda pool, **rest: pool[1].add_(1))
    same_values(result, case.result)
    same_values(after["pool"], case.changed["pool"])

# SPDX-License-Identifier: Apache-2.0
"""Every source names its license in its first line, behind a shebang in its second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENDINGS = (".py", ".sh", ".toml", ".yml", ".jinja2")
BUILT = ("build", "dist", "__pycache__")


def sources() -> Iterator[Path]:
    """All files of such names; hidden folders hold what tools make, but .ci what people wrote."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in BUILT and (name[0] != "." or name == ".ci")]
        yield from (Path(folder, name) for name in files if name.endswith(ENDINGS) or Path(folder).name == ".ci")


def test_every_source_names_its_license() -> None:
    found = list(sources())
    assert len(found) > 400
    without = []
    for path in found:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            line = file.readline() if first.startswith("#!") else first
        if line.strip(" {#}\n") != "SPDX-License-Identifier: Apache-2.0":
            without.append(path.relative_to(ROOT).as_posix())
    assert without == []

# SPDX-License-Identifier: Apache-2.0
"""scripts/api_site.py: the reference of the public interface, and where its links lead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels import layers

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/api_site.py"


def test_the_reference_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc is not installed")
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    names = {path: set(re.findall(r'id="([^"]+)"', text)) for path, text in pages.items()}
    links = 0
    for path, text in pages.items():
        for target, anchor in re.findall(r'href="([^"#:]*)(?:#([^"]*))?"', text):
            page = (path.parent / target).resolve() if target else path
            assert page in pages, (path, target)
            assert not anchor or anchor in names[page], (path, target, anchor)
            links += 1
    assert links > 500
    assert set(cute_kernels.__all__) <= names[tmp_path / "cute_kernels.html"]
    assert set(layers.__all__) <= names[tmp_path / "cute_kernels/layers.html"]
    decode = pages[tmp_path / "cute_kernels.html"]
    assert "extra_topk_length" in decode

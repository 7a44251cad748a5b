#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Build the reference of the public interface from its docstrings, as HTML pages.

pip install -e '.[docs]'
scripts/api_site.py OUT        # then open OUT/index.html
"""

from __future__ import annotations

import argparse
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODULES = (
    "cute_kernels", "cute_kernels.compat", "cute_kernels.formats", "cute_kernels.models", "cute_kernels.numerics",
    "cute_kernels.paging", "cute_kernels.support", "cute_kernels.runtime.registry", "cute_kernels.runtime.record",
    "cute_kernels.layers",
)  # fmt: skip
"""Beside the ops of every folder and the modules of the layers."""


def public_modules() -> list[str]:
    """Names of the modules that users import: no kernels, and no compiler is loaded for them."""
    import cute_kernels
    import cute_kernels.layers

    layers = [module.name for module in pkgutil.iter_modules(cute_kernels.layers.__path__, "cute_kernels.layers.")]
    folders = [folder.name for folder in pkgutil.iter_modules(cute_kernels.__path__, "cute_kernels.") if folder.ispkg]
    ops = [f"{name}.ops" for name in folders if name != "cute_kernels.runtime"]
    return [*MODULES, *layers, *(name for name in ops if importlib.util.find_spec(name) is not None)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the pages")
    args = parser.parse_args(argv)
    try:
        import pdoc
    except ImportError:
        print("api_site.py: error: pdoc is not installed: pip install -e '.[docs]'", file=sys.stderr)
        return 2
    pdoc.render.configure(
        template_directory=ROOT / "scripts/data/api_template", show_source=False, docformat="markdown", search=False
    )
    warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)  # it shows them as they are written
    pdoc.pdoc(*public_modules(), output_directory=args.out)
    print(f"{args.out / 'index.html'}: {len(list(args.out.rglob('*.html')))} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())

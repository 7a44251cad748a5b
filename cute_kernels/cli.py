# SPDX-License-Identifier: Apache-2.0
"""What is installed and runs here (info), kernels compiled ahead (precompile), kernels verified on this GPU (verify).

Exit status: 0 all is well, 1 a kernel failed or its code is not that of an older list, 2 the request cannot be met (bad
argument, no GPU, GPU too old).
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cute_kernels import __version__
from cute_kernels.models import MODELS, ModelShape
from cute_kernels.runtime.key import KernelKey

PROGRAM = "python -m cute_kernels"
VARIABLES = (
    "CUTE_KERNELS_CACHE_DIR", "CUTE_KERNELS_CHECK", "CUTE_KERNELS_FALLBACK", "CUTE_KERNELS_JIT", "CUTE_KERNELS_LOG",
    "CUTE_KERNELS_NVTX", "CUTE_KERNELS_PLUGIN",
    "CUTE_DSL_ARCH", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
TP_SIZES = (1, 2, 4, 8)
STYLES = {"pass": "green", "fail": "bold red"}
VERDICTS = {
    "measured": "have kernels measured on it",
    "compiled": "kernels compiled for it and not measured",
    "partly": "kernels compiled for it for some of their calls",
    "reference": "no kernel (CUTE_KERNELS_FALLBACK=reference runs their references)",
    "no": "no kernel for it",
}
"""Status in the support table -> what a sentence says of the ops that have it, best first."""

TENSOR_CORE_SECONDS, PLAIN_SECONDS = 4.0, 1.5
"""What compiling a kernel takes a core, roughly."""

TICK_SECONDS = 10.0
"""Between two lines of progress where standard error is no terminal."""


class Refusal(Exception):
    """A request that cannot be met, in one line."""


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {value}")
    return value


_positive.__name__ = "integer"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"cute_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", parser_class=Parser)

    info = commands.add_parser("info", help="versions, GPU, cache, environment, and how each op is supported")
    info.add_argument("--json", action="store_true", help="print JSON")

    ahead = commands.add_parser(
        "precompile",
        help="compile every kernel a deployment needs; no GPU needed",
        description="Compile every kernel a deployment needs into a folder, in processes that see no GPU. A process "
        "with CUTE_KERNELS_CACHE_DIR set to the folder and CUTE_KERNELS_JIT=forbid then runs without a compiler.",
    )
    ahead.add_argument(
        "--arch", action="append", metavar="ARCH", help="compile target such as sm_90a; may be repeated (this GPU's)"
    )
    model = ahead.add_mutually_exclusive_group()
    model.add_argument("--model", choices=sorted(MODELS), help="model whose kernels are needed (v4-flash)")
    model.add_argument("--config", type=Path, metavar="config.json", help="the same for any model of the family")
    model.add_argument("--all", action="store_true", help="every model and tensor-parallel size")
    ahead.add_argument("--tp", type=_positive, metavar="N", help="tensor-parallel ranks (1)")
    ahead.add_argument("--kernel", metavar="GLOB", help="kernels of such names only, such as 'sparse_mla.hopper.*'")
    result = ahead.add_mutually_exclusive_group()
    result.add_argument("--out", type=Path, metavar="DIR", help="folder for the kernels (the kernel cache)")
    result.add_argument("--hash", type=Path, metavar="FILE", help="instead, list hashes of the kernels' code")
    result.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two such lists")
    ahead.add_argument("--workers", type=_positive, metavar="N", help="processes (one per core)")
    ahead.add_argument("--quiet", action="store_true", help="no progress; list only the kernels with problems")
    ahead.add_argument("--json", action="store_true", help="print JSON")

    verify = commands.add_parser(
        "verify",
        help="run every kernel against its reference on the GPU at hand",
        description="Run every op that has a kernel, and its reference on the CPU, on edge cases; compare all bytes. "
        "The verdicts are kept in the kernel cache: an architecture's own kernel that nobody has measured there runs "
        "only where it has passed.",
    )
    verify.add_argument("--op", action="append", metavar="NAME", help="this op only; may be repeated (all)")
    verify.add_argument("--workers", type=_positive, metavar="N", help="processes that compile (one per core)")
    verify.add_argument("--layers", action="store_true", help="then whole layers against the CPU (package layers)")
    verify.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        if options.command == "verify":
            from cute_kernels.cli_verify import verify

            return verify(options)
        return {"info": info, "precompile": precompile}[options.command](options)
    except Refusal as error:
        print(f"{PROGRAM} {options.command}: error: {error}", file=sys.stderr)
        return 2


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


# ---- info ------------------------------------------------------------------------------------------------------------


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gather_info() -> dict[str, Any]:
    """Everything that `info` shows."""
    import torch

    from cute_kernels import support
    from cute_kernels.runtime import cache, trust
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.registry import all_ops

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            arch, reason, verdicts = arch_of(index), None, trust.verdicts(index)
        except ValueError as error:
            arch, reason, verdicts = None, str(error), {}
        name = torch.cuda.get_device_name(index)
        gpus.append({"name": name, "arch": arch, "unsupported": reason, "verdicts": verdicts})
    store = cache.current()
    ops = {}
    for name in sorted(all_ops()):
        found = {arch: support.support(name, arch) for arch in support.ARCHS}
        ops[name] = {arch: {"status": s.status, "record": s.record} for arch, s in found.items()}
    return {
        "versions": {
            "cute_kernels": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"),
            "apache-tvm-ffi": version("apache-tvm-ffi"),
        },
        "gpus": gpus,
        "arch": gpus[0]["arch"] if gpus else os.environ.get("CUTE_DSL_ARCH"),
        "cache": {
            "directory": None if store is None else str(store.root),
            "contents": [] if store is None else store.contents(),
        },
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "support": ops,
    }


def info(options: argparse.Namespace) -> int:
    found = gather_info()
    if options.json:
        print_json(found)
        return 0
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(what_runs(found))}[/]\n")
    plain = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found["versions"].items():
        plain.add_row(name, str(value) if value else "not installed")
    for number, gpu in enumerate(found["gpus"]):
        plain.add_row(f"cuda:{number}", f"{gpu['name']}, {gpu['arch'] or gpu['unsupported']}")
        for op, kernels in gpu["verdicts"].items():
            for kernel, status in kernels.items():
                plain.add_row("", f"{op}: {kernel}: {status} (verify)")
    if not found["gpus"]:
        target = found["arch"]
        plain.add_row("gpu", f"none; target {target} (CUTE_DSL_ARCH)" if target else "none")
    plain.add_row("kernel cache", found["cache"]["directory"] or "off")
    for line in found["cache"]["contents"]:
        use = "" if line["current"] else ", of other sources or versions"
        plain.add_row("", f"{line['arch']}: {line['objects']} kernels, {line['bytes'] / 1024:.0f} KiB{use}")
    for name, value in found["variables"].items():
        if value is not None:
            plain.add_row(name, value)
    console.print(plain)
    console.print(
        "\nkernels (measured: ran on that GPU, with a record; compiled: inspected, without a record; partly: compiled, "
        "for some calls; no: none there)"
    )
    for status, names in by_verdict(found["support"], found["arch"]).items():
        console.print(f"  {status}: {len(names)} op{'s' * (len(names) > 1)}")
        console.print(textwrap.fill(", ".join(names), 116, initial_indent=" " * 4, subsequent_indent=" " * 4))
    return 0


def what_runs(found: dict[str, Any]) -> str:
    """One sentence: what calls on this machine run."""
    if not found["gpus"]:
        why = "" if found["versions"]["cuda"] else " (this torch is built without CUDA)"
        return f"No GPU here{why}: CPU tensors run the exact references; kernels can be compiled ahead for any GPU."
    gpu = found["gpus"][0]
    if gpu["arch"] is None:
        return f"{gpu['name']}: no kernel runs on this GPU, CPU tensors run the exact references."
    statuses = [by_arch[gpu["arch"]]["status"] for by_arch in found["support"].values() if gpu["arch"] in by_arch]
    if not statuses:
        return (
            f"{gpu['name']}, {gpu['arch']}: kernels compile for it and were never run: start with `{PROGRAM} verify`."
        )
    counts = {status: statuses.count(status) for status in VERDICTS if status in statuses}
    named = ", ".join(f"{count} {VERDICTS[status]}" for status, count in counts.items())
    sentence = f"{gpu['name']}, {gpu['arch']}: of {len(statuses)} ops {named}"
    if "measured" not in counts:
        sentence += (
            f"; its own tensor-core kernels run once `{PROGRAM} verify` has passed them, portable ones until then"
        )
    return sentence + "."


def by_verdict(support: dict[str, dict[str, Any]], arch: str | None) -> dict[str, list[str]]:
    """What is said of ops -> those it is said of: of all architectures, or of `arch` where the table has it."""
    groups: dict[str, list[str]] = {}
    for name, by_arch in support.items():
        known = {arch: by_arch[arch]} if arch in by_arch else by_arch
        found = support_groups(known)
        if arch not in by_arch and list(found) == ["reference"]:
            found = {"reference everywhere": []}
        groups.setdefault(", ".join(" ".join([status, *archs]) for status, archs in found.items()), []).append(name)
    return dict(sorted(groups.items(), key=lambda group: ([*VERDICTS].index(group[0].split()[0]), -len(group[1]))))


def support_groups(by_arch: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Status -> architectures, best status first."""
    groups = {status: [arch for arch, cell in by_arch.items() if cell["status"] == status] for status in VERDICTS}
    return {status: archs for status, archs in groups.items() if archs}


# ---- precompile ------------------------------------------------------------------------------------------------------


def wanted_archs(given: Sequence[str] | None) -> list[str]:
    """The compile targets asked for, or that of the GPU at hand."""
    import torch

    from cute_kernels.runtime.arch import arch_of, check_arch

    try:
        if given:
            return [check_arch(arch) for arch in dict.fromkeys(given)]
        if torch.cuda.is_available():
            return [arch_of(torch.cuda.current_device())]
    except ValueError as error:
        raise Refusal(str(error)) from error
    raise Refusal("--arch: expected a compile target such as sm_90a on a machine without a GPU")


def wanted_deployments(options: argparse.Namespace) -> list[tuple[ModelShape, int]]:
    """(model, tensor-parallel ranks) of every deployment asked for."""
    if options.all:
        sizes = TP_SIZES if options.tp is None else (options.tp,)
        return [(model, tp) for model in MODELS.values() for tp in sizes]
    tp = 1 if options.tp is None else options.tp
    if options.config is None:
        return [(MODELS[options.model or "v4-flash"], tp)]
    try:
        return [(ModelShape.from_json(options.config), tp)]
    except ValueError as error:
        raise Refusal(str(error)) from error


def wanted_keys(options: argparse.Namespace) -> list[KernelKey]:
    """Keys of all kernels asked for, each once."""
    archs = wanted_archs(options.arch)
    deployments = wanted_deployments(options)
    from cute_kernels.runtime.registry import deployment_keys

    try:
        keys = [key for arch in archs for model, tp in deployments for key in deployment_keys(model, tp, arch)]
    except ValueError as error:
        raise Refusal(str(error)) from error
    if options.kernel is not None:
        keys = [key for key in keys if fnmatch.fnmatchcase(key.kernel_name, options.kernel)]
        if not keys:
            raise Refusal(f"--kernel: expected a pattern of kernels' names, got {options.kernel!r}: none is like it")
    return list(dict.fromkeys(keys))


def precompile(options: argparse.Namespace) -> int:
    if options.compare is not None:
        return compare_hashes(options)
    keys = wanted_keys(options)
    if options.hash is not None:
        return write_hashes(keys, options)
    from cute_kernels.runtime import bundle, cache
    from cute_kernels.runtime.precompile import precompile as run
    from cute_kernels.runtime.registry import ops_with_kernels

    folder = options.out or cache.default_directory()
    if folder is None:
        raise Refusal(f"--out: expected a folder: there is no kernel cache ({cache.DIRECTORY_VARIABLE})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        name = "--out" if options.out else cache.DIRECTORY_VARIABLE
        raise Refusal(f"{name}: expected a folder that can be written, got {folder}: {error.strerror}") from error
    if not options.quiet:
        _announce(keys, options.workers)
    start = time.perf_counter()
    results = run(keys, folder.resolve(), options.workers)
    outcomes = list(results if options.quiet else with_progress(results, len(keys), "compiling"))
    seconds = time.perf_counter() - start
    outcomes.sort(key=lambda outcome: keys.index(outcome.key))
    digest = bundle.seal(folder) if options.out else None
    served = {op.name for op in ops_with_kernels()}
    if options.json:
        print_json(
            {
                "directory": str(folder.resolve()),
                "digest": digest,
                "kernels": [
                    {
                        "key": outcome.key.identity,
                        "arch": outcome.key.arch,
                        "status": outcome.status,
                        "facts": outcome.facts and outcome.facts.to_json(),
                        "problems": list(outcome.problems),
                        "seconds": round(outcome.seconds, 3),
                    }
                    for outcome in outcomes
                ],
                "ops": sorted(served),
            }
        )
    else:
        shown = [o for o in outcomes if o.problems or not options.quiet]
        _print_outcomes(shown)
        _print_total(outcomes, folder.resolve(), seconds, digest)
    return 1 if any(o.status == "failed" or o.problems for o in outcomes) else 0


def _announce(keys: Sequence[KernelKey], workers: int | None) -> None:
    """Say on standard error how much there is to do."""
    from cute_kernels.runtime.precompile import usable_cores

    processes = min(len(keys), workers or usable_cores())
    tensor_cores = sum(any("mma" in name for name in key.instructions) for key in keys)
    seconds = (tensor_cores * TENSOR_CORE_SECONDS + (len(keys) - tensor_cores) * PLAIN_SECONDS) / processes
    counts = f"{len(keys)} kernels, {processes} process{'es' * (processes > 1)}"
    print(f"{counts}: about {_duration(seconds)} if none of them is there yet", file=sys.stderr)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _print_total(outcomes: Sequence[Any], folder: Path, seconds: float, digest: str | None) -> None:
    from cute_kernels.runtime import bundle

    failed = sum(o.status == "failed" for o in outcomes)
    cached = sum(o.status == "cached" for o in outcomes)
    print(
        f"{len(outcomes) - failed} of {len(outcomes)} kernels in {folder} ({cached} were there), {_duration(seconds)}"
    )
    if not failed:
        print(f"use them with CUTE_KERNELS_CACHE_DIR={folder} CUTE_KERNELS_JIT=forbid")
    if digest is not None:
        print(f"to load no other files than these, set {bundle.DIGEST_VARIABLE}={digest} too")


def _print_outcomes(outcomes: Sequence[Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    arch = None
    for o in outcomes:
        if o.key.arch != arch:
            arch = o.key.arch
            console.print(f"[bold]{arch}[/]")
        fields = o.key.identity.rpartition("(")[2].rstrip(")").partition(", ")[2]
        console.print(f"  {o.key.kernel_name}  [dim]{escape(fields)}[/]")
        if o.facts is not None:
            f = o.facts
            found = ", ".join(f"{count} {name}" for name, count in f.instructions.items())
            console.print(
                f"    {o.status} in {o.seconds:.2f} s: {f.registers} registers, {f.spill_stores + f.spill_loads} bytes "
                f"spilled, {f.smem} bytes of shared memory; {found}"
            )
        for problem in o.problems:
            console.print(f"    [bold red]{escape(problem)}[/]")


def write_hashes(keys: Sequence[KernelKey], options: argparse.Namespace) -> int:
    from cute_kernels.runtime import code_hash

    try:
        options.hash.touch()
    except OSError as error:
        raise Refusal(f"--hash: cannot write {options.hash}: {error.strerror}") from error
    hashes = list(with_progress(code_hash.hash_keys(keys, options.workers), len(keys), "hashing"))
    code_hash.write_list(options.hash, hashes)
    failed = {line.key: line.error for line in sorted(hashes, key=lambda line: line.key) if line.error}
    if options.json:
        print_json({"file": str(options.hash), "kernels": len(hashes), "failed": failed})
    else:
        for key, why in failed.items():
            print(f"{key}\n    does not compile: {why}")
        print(f"hashes of {len(hashes) - len(failed)} of {len(hashes)} kernels in {options.hash}")
    return 1 if failed else 0


def compare_hashes(options: argparse.Namespace) -> int:
    from cute_kernels.runtime import code_hash

    try:
        found = code_hash.compare(*(code_hash.read_list(path) for path in options.compare))
    except ValueError as error:
        raise Refusal(f"--compare: {error}") from error
    if options.json:
        print_json(vars(found))
    else:
        for key, why in found.changed.items():
            print(f"changed   {key}: {why}")
        for name, keys in (("only old", found.only_old), ("only new", found.only_new)):
            for key in keys:
                print(f"{name}  {key}")
        sizes = (len(found.equal), len(found.changed), len(found.only_old), len(found.only_new))
        print("{} equal, {} changed, {} only old, {} only new".format(*sizes))
    return 1 if found.changed else 0


def with_progress(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """The items, with their progress on standard error while they come: a bar, or lines where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _with_lines(items, total, what)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            progress.advance(task)
            yield item


def _with_lines(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    start = said = time.perf_counter()
    for count, item in enumerate(items, 1):
        now = time.perf_counter()
        if now - said >= TICK_SECONDS:
            said, passed = now, now - start
            left = "" if count == total else f", about {_duration(passed / count * (total - count))} left"
            print(f"{what}: {count} of {total} in {_duration(passed)}{left}", file=sys.stderr, flush=True)
        yield item

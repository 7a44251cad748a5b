# SPDX-License-Identifier: Apache-2.0
"""Measure ops beside their peers, write the report, compare records.

Exit status: 0 all is well, 1 a measurement failed, a record was rejected or a comparison found a regression, 2 the
request cannot be met (bad argument, no GPU, unreadable file).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cute_kernels.cli import Parser, Refusal
from perf import compiled, plots, report
from perf.compare import Change, compare
from perf.peers import PeerMissing, missing_allowed
from perf.records import LEAST_REPLAYS, Record, RecordError, collect, load, parse, to_text, usable
from perf.targets import LAYERS, losses

PROGRAM = "python -m perf"
ROOT = Path(__file__).parent.parent
MODULES = {
    "all_visible_entries": "perf.topk",
    "bf16_gemm": "perf.gemm",
    "build_c128a_topk_metadata": "perf.indices",
    "build_flashinfer_mixed_sparse_indices": "perf.indices",
    "build_step_metadata": "perf.indices",
    "combine_topk_swa_indices": "perf.indices",
    "compress_latent": "perf.latents",
    "compress_norm_rope_store": "perf.compressor_entries",
    "compute_decode_swa_indices": "perf.indices",
    "compute_global_topk_indices_and_lens": "perf.indices",
    "cp_gather_indexer_k_quant_cache": "perf.indexer",
    "deepseek_v4_fp8_einsum": "perf.einsum",
    "dequantize_and_gather_k_cache": "perf.kv_cache",
    "fp8_bf16_gemm": "perf.gemm",
    "fp8_gemm": "perf.gemm",
    "fp8_gemm_squares": "perf.gemm",
    "fused_compress_norm_rope_store": "perf.compressor_entries",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": "perf.qnorm",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": "perf.qnorm",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": "perf.qnorm",
    "fused_indexer_q_rope_quant_fp8": "perf.indexer",
    "fused_indexer_q_rope_quant_mxfp4": "perf.indexer",
    "fused_inv_rope": "perf.inv_rope",
    "fused_inv_rope_fp8_quant": "perf.inv_rope",
    "fused_mtp_input_rmsnorm": "perf.norm",
    "fused_q_kv_rmsnorm": "perf.norm",
    "fused_q_kv_rmsnorm_quant": "perf.norm",
    "fused_qkv_insert_compress": "perf.insert_compress",
    "fused_qkv_insert_compress_index": "perf.insert_compress",
    "get_compressed_slot_mapping": "perf.indices",
    "k_norm_rope_store": "perf.latents",
    "merge_attention_states": "perf.merge",
    "merge_top_k_keys": "perf.context",
    "mqa_logits": "perf.logits",
    "mtp_shared_head_rmsnorm": "perf.norm",
    "pack_records": "perf.context",
    "paged_mqa_logits": "perf.logits",
    "quantize_and_insert_k_cache": "perf.kv_cache",
    "quantize_fp8_1x128": "perf.linear",
    "rope_quant_insert": "perf.latents",
    "save_partial_states": "perf.compressor",
    "score_candidates_decode": "perf.candidates",
    "score_candidates_prefill": "perf.candidates",
    "score_top_k_decode": "perf.score_top_k",
    "score_top_k_prefill": "perf.score_top_k",
    "select_candidate_blocks": "perf.candidates",
    "sparse_mla_decode": "perf.decode",
    "sparse_mla_mixed": "perf.mixed",
    "sparse_mla_prefill": "perf.prefill",
    "sparse_mla_prefill_paged": "perf.paged",
    "top_k_keys": "perf.context",
    "top_k_per_row_decode": "perf.topk",
    "top_k_per_row_prefill": "perf.topk",
    "unpack_records": "perf.context",
}
"""Op -> module whose SWEEPS measures it."""

REPLAYS = 21
ALLOW_MISSING = "skip peers that cannot be imported, which else ends the sweep; their cells get no ratio"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


_numbers.__name__ = "comma-separated integers"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", parser_class=Parser)

    sweep = commands.add_parser(
        "sweep",
        help="measure ops over their shapes, and the ceilings of the GPU",
        description="Measure ops over their shapes, and the ceilings of the GPU. Several ops are measured in a process "
        "each: importing a peer may change the compiler.",
    )
    sweep.add_argument(
        "--op", action="append", choices=sorted(MODULES), metavar="NAME", help="this op only; may be repeated (all)"
    )
    sweep.add_argument("--rows", type=_numbers, metavar="N,N", help="these numbers of rows only")
    sweep.add_argument("--quick", action="store_true", help="few shapes and replays; not for the report")
    sweep.add_argument("--peers", action="store_true", help="other projects' kernels too")
    sweep.add_argument("--allow-missing-peers", action="store_true", help=ALLOW_MISSING)
    sweep.add_argument("--variants", action="store_true", help="our kernels' other configurations too")
    sweep.add_argument("--replays", type=int, metavar="N", help=f"graph replays per candidate ({REPLAYS})")
    sweep.add_argument(
        "--json", type=Path, metavar="OUT", help="file for the record, or folder for one <op>.json per op"
    )

    sweep.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="take the GPU's ceilings from FILE; measure them into it if it is new",
    )

    layer = commands.add_parser(
        "layer",
        help="measure whole attention layers in CUDA graphs and eagerly",
        description="Measure whole attention layers: GPU time in a CUDA graph, host time of an eager layer, launches.",
    )
    layer.add_argument("--model", choices=("v4", "v4.1-flash"), default="v4", help="V4's models, or V4.1 (v4)")
    layer.add_argument("--full", action="store_true", help="many more batch sizes, contexts and ranks")
    layer.add_argument("--peers", action="store_true", help="other projects' kernels too")
    layer.add_argument("--allow-missing-peers", action="store_true", help=ALLOW_MISSING)
    layer.add_argument("--only", metavar="REGEX", help="cells whose name this finds; not for the report")
    layer.add_argument("--replays", type=int, default=REPLAYS, metavar="N", help=f"graph replays per cell ({REPLAYS})")
    layer.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no cell after so long")
    layer.add_argument("--json", type=Path, metavar="OUT", help="file for the record, or folder for a file of its name")
    layer.add_argument("--ceilings", type=Path, metavar="FILE", help="as of sweep")

    engines = commands.add_parser(
        "engines",
        help="vLLM's own layers, with and without the plug-in: compare what they write, and measure them",
        description="vLLM's own layers, with and without the plug-in: what they write is compared, then the time of "
        "steps in a CUDA graph is measured, whole and without the engine's linears. vLLM must be installed.",
    )
    engines.add_argument("--check", action="store_true", help="compare, and measure nothing")
    engines.add_argument("--only", default="", metavar="REGEX", help="what has this in its name; not for the report")
    engines.add_argument("--replays", type=int, default=REPLAYS, metavar="N", help=f"replays per cell ({REPLAYS})")
    engines.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no cell after so long"
    )
    engines.add_argument("--json", type=Path, metavar="OUT", help="file for the record, or folder for engines.json")
    engines.add_argument("--ceilings", type=Path, metavar="FILE", help="as of sweep")

    written = commands.add_parser(
        "report",
        help="write perf/REPORT.md, perf/plots and the pages' numbers from the records",
        description="Write perf/REPORT.md, perf/plots and the numbers of README.md and docs/engines.md from "
        "perf/results/<gpu>/<op>.json.",
    )
    written.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="repository to work on (this one)")
    written.add_argument("--no-plots", action="store_true", help="leave the pictures as they are")
    written.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is out of date")

    shown = commands.add_parser(
        "show",
        help="what the records say of an op; no GPU needed",
        description="Times of an op's cells and of its peers, from perf/results.",
    )
    others = (*LAYERS, "engines")
    shown.add_argument(
        "op", choices=sorted([*MODULES, *others]), metavar="OP", help="name of an op, of layers or engines"
    )
    shown.add_argument("case", nargs="?", metavar="CASE", help="cells whose name this regular expression finds (all)")
    shown.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="repository with the records (this one)")

    made = commands.add_parser(
        "compiled",
        help="compile the kernels for GPUs that nobody here has, for the report; no GPU needed",
        description=f"Compile Blackwell's own kernels and write what came out to {compiled.FILE}.",
    )
    made.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="repository to work on (this one)")
    made.add_argument("--workers", type=int, metavar="N", help="processes (one per core)")

    scaled = commands.add_parser(
        "scaling",
        help="what layers should take on 2 to 64 GPUs, by a model; no GPU needed",
        description="Tables of a model of V4's attention layers on several GPUs: bytes, measured rates, collectives.",
    )
    scaled.add_argument("--model", choices=("v4-flash", "v4-pro"), default="v4-flash", help="(v4-flash)")
    scaled.add_argument("--gpus", type=_numbers, metavar="N,N", help="these numbers of GPUs (2,4,8,16,32,64)")
    scaled.add_argument("--picture", type=Path, metavar="FILE.png", help="draw it too, with matplotlib")

    divided = commands.add_parser(
        "parallel",
        help="measure attention layers on several GPUs of this host, divided in all ways",
        description="Measure attention layers on several GPUs, over NCCL: tensor parallel, context groups, data "
        "parallel, one GPU. A layer of v4-flash in CUDA graphs, as perf scaling compares with its model.",
    )
    divided.add_argument("--gpus", type=int, default=2, metavar="N", help="the first N GPUs (2)")
    divided.add_argument("--only", default="", metavar="REGEX", help="cells whose name this finds")
    divided.add_argument("--replays", type=int, default=REPLAYS, metavar="N", help=f"replays per cell ({REPLAYS})")
    divided.add_argument("--json", type=Path, metavar="FILE", help="for the record")

    compared = commands.add_parser("compare", help="how our times changed from one set of records to another")
    compared.add_argument("before", type=Path, metavar="A", help="record file, or folder of records")
    compared.add_argument("after", type=Path, metavar="B", help="record file, or folder of records")
    compared.add_argument(
        "--threshold", type=float, default=5.0, metavar="PERCENT", help="growth that counts as a regression (5)"
    )
    compared.add_argument("--fail", action="store_true", help="exit 1 if there is a regression")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "sweep": sweep,
        "layer": measure_layers,
        "engines": measure_engines,
        "report": write_report,
        "show": show_records,
        "compiled": write_compiled,
        "compare": show_comparison,
        "scaling": show_scaling,
        "parallel": measure_parallel,
    }
    try:
        status = commands[options.command](options)
        sys.stdout.flush()
        return status
    except (Refusal, RecordError) as error:
        print(f"{PROGRAM} {options.command}: error: {error}", file=sys.stderr)
        return 2
    except PeerMissing as error:
        print(f"{PROGRAM} {options.command}: {error}; --allow-missing-peers skips it", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads the output has enough of it, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to be written at the end
        return 1


def _console() -> Console:
    """For tables: as wide as they need where the output is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _table(*columns: str) -> Table:
    """A table whose columns with a leading ">" are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Literal["right", "left"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=bool(name))
    return table


# ---- sweep -----------------------------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys(options.op or sorted(MODULES)))
    default = LEAST_REPLAYS if options.quick else REPLAYS
    replays = default if options.replays is None else options.replays
    if replays < LEAST_REPLAYS:
        raise Refusal(f"--replays: expected at least {LEAST_REPLAYS}, got {replays}")
    if options.rows is not None and min(options.rows) < 1:
        raise Refusal(f"--rows: expected positive integers, got {min(options.rows)}")
    out: Path | None = options.json
    if out is not None and out.suffix == ".json" and len(names) > 1:
        raise Refusal(f"--json: expected a folder for {len(names)} ops, got {out}")
    if out is not None:
        try:
            (out.parent if out.suffix == ".json" else out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(f"--json: {out}: {error.strerror}") from error
    import torch

    if not torch.cuda.is_available():
        raise Refusal("there is no CUDA device here: nothing was measured")
    if len(names) > 1:
        return _sweep_apart(names, options, replays)
    path = out / f"{names[0]}.json" if out is not None and out.suffix != ".json" else out
    so_far = None if path is None else path.with_suffix(".partial.json")
    try:
        text = to_text(measure(names[0], options, replays, so_far))
    except PeerMissing:
        raise
    except (RuntimeError, NotImplementedError) as error:
        print(f"{PROGRAM} sweep: {names[0]} failed: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    try:
        record, problem = parse(json.loads(text), names[0]), ""
        _print_record(record)
        problem = "; ".join(usable(record)[1])
    except RecordError as error:
        problem = str(error)
    if problem and path is not None:
        path = path.with_suffix(".rejected.json")  # GPU time is dear: what was measured can still be looked at
    if path is not None:
        try:
            path.write_text(text)
        except OSError as error:
            raise Refusal(f"--json: {path}: {error.strerror}") from error
    if so_far is not None:
        so_far.unlink(missing_ok=True)
    if problem:
        print(f"{PROGRAM} sweep: rejected: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _sweep_apart(names: Sequence[str], options: argparse.Namespace, replays: int) -> int:
    """One process per op; 1 if any failed. The ceilings are measured once, by the first."""
    with tempfile.TemporaryDirectory() as folder:
        return _sweep_processes(names, options, replays, options.ceilings or Path(folder) / "ceilings.json")


def _sweep_processes(names: Sequence[str], options: argparse.Namespace, replays: int, ceilings: Path) -> int:
    flags = [f"--{name}" for name in ("quick", "peers", "variants") if getattr(options, name)]
    flags += ["--allow-missing-peers"] * options.allow_missing_peers
    flags += ["--ceilings", str(ceilings)]
    flags += ["--replays", str(replays)]
    if options.rows is not None:
        flags += ["--rows", ",".join(map(str, options.rows))]
    failed = []
    for name in names:
        to = [] if options.json is None else ["--json", str(options.json / f"{name}.json")]
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", "perf", "sweep", "--op", name, *flags, *to]).returncode:
            failed.append(name)
    if failed:
        print(f"{PROGRAM} sweep: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(op: str, options: argparse.Namespace, replays: int, so_far: Path | None = None) -> dict[str, Any]:
    """The record of one op on the GPU at hand, for JSON. RuntimeError if a reference ran or a result is wrong.

    so_far   file that holds, while it measures, a partial record of the cells that it has: what an interrupted sweep
             leaves
    """
    from perf import ceilings
    from perf.conditions import watch
    from perf.measure import cold_bytes, environment, keep_cells
    from perf.records import SCHEMA

    module = importlib.import_module(MODULES[op])
    rows = options.rows or (module.QUICK[op] if options.quick else None)
    chosen = {} if rows is None else {"rows": rows}
    machine = environment()
    found = _ceilings(options.ceilings, partial(ceilings.measure, replays))
    known = ceilings.yardsticks(machine["gpu"], found)
    facts = {"cold_bytes": cold_bytes(), "ceilings": found, "yardsticks": known}
    kept: list[dict[str, Any]] = []

    def keep(cell: dict[str, Any]) -> None:
        kept.append(cell)
        ceilings.add_percentages([cell], known)
        if so_far is not None:
            so_far.write_text(
                to_text({"schema": SCHEMA, "op": op, **machine, "partial": True, **facts, "records": kept})
            )

    with watch() as conditions, missing_allowed(options.allow_missing_peers), keep_cells(keep):
        cells = module.SWEEPS[op](peers=options.peers, variants=options.variants, replays=replays, **chosen)
    if not cells:
        raise Refusal(f"--rows: {op} has no shape with that many rows")
    ceilings.add_percentages(cells, known)
    took = {"conditions": conditions, "partial": rows is not None}
    return {"schema": SCHEMA, "op": op, **machine, **took, **facts, "records": cells}


def _ceilings(path: Path | None, measured: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if path is None:
        return measured()
    if not path.exists():
        path.write_text(json.dumps(measured()))
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def _print_record(record: Record) -> None:
    table = _table("case", "candidate", ">us", ">apart", ">p10", ">p90", ">GB/s", ">% of ceiling", ">host us", "")
    for cell in record.cells:
        for row in cell.rows:
            remarks = [] if row.checked else ["[yellow]result differs[/]"]
            if row is cell.ours:
                remarks += [f"[bold red]{escape(reason)}[/]" for reason in losses(record.gpu, cell)]
            percent = "" if row.percent is None else f"{row.percent:.1f}"
            host = "" if row.host is None else f"{row.host.us:.2f}"
            name = f"[bold]{row.name}[/]" if row is cell.ours else escape(row.name)
            times = ["" if us is None else f"{us:.2f}" for us in (row.us, row.apart, row.p10, row.p90)]
            case = cell.case if row is cell.ours else ""
            table.add_row(case, name, *times, f"{row.gbs:.0f}", percent, host, "; ".join(remarks))
        for skipped in cell.skipped:
            table.add_row("", escape(skipped.name), *[""] * 7, f"[dim]skipped: {escape(skipped.reason)}[/]")
    ceilings = _table("ceiling", ">measured", "unit")
    for c in record.ceilings:
        ceilings.add_row(c.name, f"{c.value:.2f}" if c.unit == "us" else f"{c.value:.0f}", c.unit)
    for missing in record.missing_ceilings:
        ceilings.add_row(missing.name, "", f"[dim]skipped: {escape(missing.reason)}[/]")
    console = _console()
    console.print(f"{record.op} on {record.gpu}, commit {record.commit}")
    console.print(table)
    console.print(ceilings)


# ---- layer -----------------------------------------------------------------------------------------------------------


def measure_layers(options: argparse.Namespace) -> int:
    import torch

    from perf import ceilings, layer, layer_v41
    from perf.conditions import watch
    from perf.measure import cold_bytes, environment
    from perf.records import SCHEMA

    is_v41 = options.model == layer_v41.MODEL
    op = layer_v41.OP if is_v41 else layer.OP
    if is_v41 and options.peers:
        raise Refusal("--peers: nobody's kernels make whole layers of V4.1 here")
    if options.replays < LEAST_REPLAYS:
        raise Refusal(f"--replays: expected at least {LEAST_REPLAYS}, got {options.replays}")
    try:
        every = (layer_v41 if is_v41 else layer).cases(options.full)
        wanted = [case for case in every if re.search(options.only or "", case.name)]
    except re.error as error:
        raise Refusal(f"--only: {options.only!r} is no regular expression: {error}") from error
    if not wanted:
        raise Refusal(f"--only: no cell's name has {options.only!r}")
    if not torch.cuda.is_available():
        raise Refusal("there is no CUDA device here: nothing was measured")
    console = _console()

    def show(case: Any, cell: dict[str, Any] | str) -> None:
        if isinstance(cell, str):
            console.print(f"{case.name:40} [dim]left out: {escape(cell)}[/]")
            return
        ours, shape = cell["rows"][0], cell["shape"]
        console.print(
            f"{case.name:40} {ours['us']:8.1f} us (p10 {ours['p10']:.1f}, p90 {ours['p90']:.1f}), "
            f"floor {shape['floor_us']:.1f}, of its ops {shape['ops_floor_us']:.1f}; "
            f"{shape['launches']:.0f} launches, gaps {shape['gaps_us']:.1f}; "
            f"eager {shape['eager_us']:.0f}, host {shape['eager_host_us']:.0f}, "
            f"metadata {shape['metadata_us']:.0f}, host {shape['metadata_host_us']:.0f}"
        )
        for peer in cell["rows"][1:]:
            times = f"{peer['us']:8.1f} us, {peer['us'] / ours['us']:.2f} times ours" if "us" in peer else ""
            console.print(f"  {peer['name']:38} {times or '[dim]skipped: ' + escape(peer['skipped']) + '[/]'}")

    machine = environment()
    found = _ceilings(options.ceilings, partial(ceilings.measure, options.replays))
    known = ceilings.yardsticks(machine["gpu"], found)
    roofs = {name: stick["value"] for name, stick in known.items()}
    if options.peers:
        from perf import peer_layer

        peer_layer.compile_ahead(wanted)
    measured: list[dict[str, Any]] = []

    def note(case: Any, cell: dict[str, Any] | str) -> None:
        show(case, cell)
        if not isinstance(cell, str):
            measured.append(cell)

    try:
        with watch() as conditions, missing_allowed(options.allow_missing_peers):
            cells, left_out, is_cut = layer.sweep(wanted, options.replays, options.budget, roofs, note, options.peers)
    except BaseException:
        if options.json is not None and measured:  # GPU time is dear: what was measured can still be looked at
            path = _record_path(options.json, op).with_suffix(".rejected.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_text({"schema": SCHEMA, "op": op, **machine, "records": measured}))
        raise
    ceilings.add_percentages(cells, known)
    is_partial = options.full or options.only is not None or is_cut
    machine |= {"conditions": conditions}
    facts = {"partial": is_partial, "cold_bytes": cold_bytes(), "ceilings": found, "yardsticks": known}
    record = {"schema": SCHEMA, "op": op, **machine, **facts, "left_out": left_out, "records": cells}
    if options.json is not None and cells:
        _write_record(record, _record_path(options.json, op))
    return 0 if cells else 1


def _record_path(given: Path, op: str) -> Path:
    return given if given.suffix == ".json" else given / f"{op}.json"


def _write_record(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        parse(record, record["op"])
    except RecordError:
        path = path.with_suffix(".rejected.json")  # GPU time is dear: what was measured can still be looked at
        raise
    finally:
        path.write_text(to_text(record))


# ---- engines ---------------------------------------------------------------------------------------------------------


def measure_engines(options: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise Refusal("there is no CUDA device here: nothing was measured")
    if options.replays < LEAST_REPLAYS:
        raise Refusal(f"--replays: expected at least {LEAST_REPLAYS}, got {options.replays}")
    from perf import ceilings, engine_layers, engines
    from perf.conditions import watch
    from perf.measure import cold_bytes, environment
    from perf.records import SCHEMA

    console = _console()

    def show(cell: dict[str, Any] | str) -> None:
        if isinstance(cell, str):
            console.print(escape(cell))
            return
        ours, peer = cell["rows"]
        console.print(
            f"{cell['shape']['case']:34} {ours['us']:8.1f} us, {peer['name']} {peer['us']:8.1f}: "
            f"{peer['us'] / ours['us']:.2f} times ours"
        )

    try:
        model = engine_layers.load()
    except ImportError as error:
        raise Refusal(f"vLLM cannot be imported: {error}") from error
    with engine_layers.one_rank("cuda"), torch.no_grad():
        if options.check:
            failed = engines.check(model, options.only, partial(print, flush=True))
            print("\n".join(sorted(engine_layers.said())))
            return 1 if failed else 0
        wanted = [case for case in engines.cases() if re.search(options.only, case.name(""))]
        machine = environment()
        found = _ceilings(options.ceilings, partial(ceilings.measure, options.replays))
        known = ceilings.yardsticks(machine["gpu"], found)
        engines.compile_ahead(wanted)
        facts = {"cold_bytes": cold_bytes(), "ceilings": found, "yardsticks": known}
        path = None if options.json is None else _record_path(options.json, engines.OP)
        so_far = None if path is None else path.with_suffix(".partial.json")  # what an interrupted run leaves
        kept: list[dict[str, Any]] = []

        def note(cell: dict[str, Any] | str) -> None:
            show(cell)
            if so_far is not None and not isinstance(cell, str):
                kept.append(cell)
                ceilings.add_percentages([cell], known)
                so_far.parent.mkdir(parents=True, exist_ok=True)
                so_far.write_text(
                    to_text({"schema": SCHEMA, "op": engines.OP, **machine, "partial": True, **facts, "records": kept})
                )

        with watch() as conditions:
            cells, is_cut = engines.sweep(model, wanted, options.replays, options.budget, note)
    ceilings.add_percentages(cells, known)
    machine |= {"conditions": conditions}
    record = {
        "schema": SCHEMA, "op": engines.OP, **machine, "partial": bool(options.only) or is_cut, **facts,
        "records": cells,
    }  # fmt: skip
    if path is not None and cells:
        _write_record(record, path)
    if so_far is not None:
        so_far.unlink(missing_ok=True)
    return 0 if cells else 1


# ---- report ----------------------------------------------------------------------------------------------------------


def write_report(options: argparse.Namespace) -> int:
    root: Path = options.root
    for wanted in (*(root / name for name in report.PAGES), root / "perf/results"):
        if not wanted.exists():
            raise Refusal(f"--root: {wanted} does not exist")
    book = collect(root / "perf/results")
    try:
        if options.check:
            stale = report.stale(root, book)
            for name in stale:
                print(f"{name} is out of date: run {PROGRAM} report")
            _complain(book.rejected)
            return 1 if stale or book.rejected else 0
        if not options.no_plots and not plots.available():
            raise Refusal(
                "the plots need matplotlib (pip install 'matplotlib>=3.8'); --no-plots leaves them as they are"
            )
        written = report.write(root, book, pictures=not options.no_plots)
    except (ValueError, OSError) as error:
        raise Refusal(str(error)) from error
    for path in written:
        print(path.relative_to(root))
    _print_losing(book.gpus())
    _complain(book.rejected)
    return 1 if book.rejected else 0


def write_compiled(options: argparse.Namespace) -> int:
    try:
        found = compiled.make(options.workers)
        path = options.root / compiled.FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(compiled.to_json(found))
    except (ValueError, OSError) as error:
        raise Refusal(str(error)) from error
    print(f"{compiled.FILE}: {len(found.kernels)} kernels. Now: {PROGRAM} report")
    return 0


def _print_losing(gpus: Any) -> None:
    table = _table("losing on", "op", "case", ">us", ">best peer us", "why")
    for gpu, records in gpus:
        for cell, reasons in report.losing_cells(gpu, records):
            best = "" if cell.best_peer is None else f"{cell.best_peer.us:.2f}"
            table.add_row(gpu, cell.op, cell.case, f"{cell.ours.us:.2f}", best, escape("; ".join(reasons)))
    if table.row_count:
        _console().print(table)


def _complain(rejected: Sequence[str]) -> None:
    for line in rejected:
        print(f"{PROGRAM} report: rejected: {line}", file=sys.stderr)


# ---- show ------------------------------------------------------------------------------------------------------------


def show_records(options: argparse.Namespace) -> int:
    paths = sorted((options.root / "perf/results").glob(f"*/{options.op}.json"))
    if not paths:
        raise Refusal(f"OP: no record of {options.op} in {options.root / 'perf/results'}")
    total = 0
    for path in paths:
        record = load(path)
        try:
            cells = tuple(cell for cell in record.cells if re.search(options.case or "", cell.case))
        except re.error as error:
            raise Refusal(f"CASE: {options.case!r} is no regular expression: {error}") from error
        if not cells:
            continue
        total += len(cells)
        _print_record(replace(record, cells=cells))
        ratios = [cell.gain for cell in cells if cell.gain is not None]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        beside = f", {mean:.2f} times as fast as the best peer in the mean of {len(ratios)}" if ratios else ", no peer"
        losing = sum(bool(losses(record.gpu, cell)) for cell in cells)
        print(f"{len(cells)} of {len(record.cells)} cells{beside}; {losing} slower than a peer or over their limit\n")
    if not total:
        raise Refusal(f"CASE: no cell's name has {options.case!r}")
    return 0


# ---- compare ---------------------------------------------------------------------------------------------------------


def show_comparison(options: argparse.Namespace) -> int:
    if options.threshold < 0:
        raise Refusal(f"--threshold: expected a percentage >= 0, got {options.threshold}")
    threshold = options.threshold / 100
    found = compare(options.before, options.after)
    table = _table("gpu", "op", "case", ">A us", ">B us", ">B/A", ">peers B/A", "")
    for change in found.changes:
        table.add_row(*change.key, *_change(change), "[bold red]regression[/]" if change.regressed(threshold) else "")
    console = _console()
    console.print(table)
    for which, keys in (("A", found.only_before), ("B", found.only_after)):
        for key in keys:
            console.print(f"[dim]only in {which}: {escape(' '.join(key))}[/]")
    for line in found.rejected:
        print(f"{PROGRAM} compare: rejected: {line}", file=sys.stderr)
    mean = math.exp(sum(math.log(change.ratio) for change in found.changes) / len(found.changes))
    regressions = found.regressions(threshold)
    worst = f", the worst {' '.join(regressions[0].key)}, {regressions[0].ratio:.3f}" if regressions else ""
    console.print(
        f"cells in both: {len(found.changes)}; B/A {mean:.3f} on average; regressions over {options.threshold:g} %: "
        f"{len(regressions)}{escape(worst)}"
    )
    return 1 if options.fail and regressions else 0


def _change(change: Change) -> tuple[str, str, str, str]:
    control = "" if change.control is None else f"{change.control:.3f}"
    return f"{change.before:.2f}", f"{change.after:.2f}", f"{change.ratio:.3f}", control


# ---- scaling ---------------------------------------------------------------------------------------------------------


def show_scaling(options: argparse.Namespace) -> int:
    from perf import scaling

    gpus = tuple(options.gpus or scaling.GPUS)
    hosts = scaling.GPUS_OF_HOST
    if any(count < 2 or (count > hosts and count % hosts) for count in gpus):
        raise Refusal(f"--gpus: expected 2 to {hosts}, or whole hosts of {hosts}, got {', '.join(map(str, gpus))}")
    console = _console()
    console.print(f"{options.model}, H200. {scaling.ASSUMED}\n")
    for form, what in scaling.WHAT.items():
        console.print(f"{form}: {what}")
    console.print(
        f"\nA decode step, microseconds of all attention layers; beyond {hosts} GPUs hosts share the requests"
    )
    held = (">GB a GPU", ">with dcp", ">with dp")
    table = _table("context", ">requests", ">GPUs", *(f">{form}" for form in scaling.DECODE_FORMS), *held)
    for line in scaling.decode_rows(options.model, gpus):
        table.add_row(*line)
    console.print(table)
    console.print("\nA whole prompt, seconds of all attention layers")
    table = _table("tokens", ">GPUs", *(f">{form}" for form in scaling.PREFILL_FORMS))
    for line in scaling.prefill_rows(options.model, gpus):
        table.add_row(*line)
    console.print(table)
    console.print("\nOne layer of v4-flash on two H200s, the model beside measured times")
    table = _table("step", ">measured us", ">model", ">of it")
    for line in scaling.measured_rows():
        table.add_row(*line)
    console.print(table)
    if options.picture is not None:
        scaling.draw(options.model, gpus, options.picture)
    return 0


# ---- parallel --------------------------------------------------------------------------------------------------------


def measure_parallel(options: argparse.Namespace) -> int:
    import torch

    from perf import parallel

    if options.replays < LEAST_REPLAYS:
        raise Refusal(f"--replays: expected at least {LEAST_REPLAYS}, got {options.replays}")
    try:
        wanted = parallel.cells(max(options.gpus, 1), options.only)
    except re.error as error:
        raise Refusal(f"--only: {options.only!r} is no regular expression: {error}") from error
    if not wanted:
        raise Refusal(f"--only: no cell's name has {options.only!r}")
    found = torch.cuda.device_count()
    if not found:
        raise Refusal("there is no CUDA device here: nothing was measured")
    if not 1 <= options.gpus <= found:
        raise Refusal(f"--gpus: expected 1 to {found}, the GPUs of this host, got {options.gpus}: nothing was measured")
    record = parallel.measure(options.gpus, options.only, options.replays)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    differ = [cell["form"] for cell in record["cells"] if cell["same_bits"] is False]
    if differ:
        print(f"{PROGRAM} parallel: ranks have other bits in {', '.join(differ)}", file=sys.stderr)
    return 1 if differ else 0

#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Run DeepSeek-V4 attention layers on a batch of requests, check them and say what ran.

Builds one attention layer of each kind (or one), feeds a batch of requests through paged caches with chunked
prefill and decode steps, checks the result against itself, and prints every op with its implementation, calls and
bytes: on a CPU with its time, on a GPU followed by what a prefill and a decode step of the layer take in a CUDA graph
and eagerly, and by the launches of the last one. At the reduced width it takes about half a minute on two cores.
With --tp T it runs over T processes, as tensor-parallel ranks that it starts itself (over gloo on a CPU, NCCL on GPUs),
and compares with one process; --cp C, of T x C processes, and --dcp D share out the requests' context. Under torchrun
it takes part with the processes that are there.
Exit status: 0 all checks passed, 1 a check failed or a rank was lost, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # Until main says more, an interrupt ends the program without a word, not amid the import of torch.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# OpenMP threads that spin while they wait make small ops ten times slower on a CPU that others use too.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
if importlib.util.find_spec("torch") is None:
    print(f"run_layer.py: error: {sys.executable} has no torch; scripts/quickstart.sh sets up .venv", file=sys.stderr)
    sys.exit(2)

import torch
from layer_runner import explain, v41
from layer_runner.dump import write_dump
from layer_runner.kernels import compile_ahead, kernels_of, kernels_of_layer
from layer_runner.picture import draw
from layer_runner.ranks import Ranks, check_gpus, join, own_rank, start
from layer_runner.report import (
    CEILINGS,
    format_bytes,
    render,
    render_exchanged,
    render_launches,
    render_steps,
    step_as_json,
)
from layer_runner.requests import InputError, Request, array_sequences, make_requests, text_sequences
from layer_runner.run import KINDS, LayerReport, count_steps, max_rows, run_layer, run_once
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels.formats import V41_KV_CACHES
from cute_kernels.layers import (
    PRESETS,
    V41_PRESETS,
    AttentionOptions,
    CheckpointError,
    CommunicatorError,
    ContextParallel,
    DeepseekV4Config,
    DeepseekV4MultiHeadLatentAttentionWrapper,
    DeepseekV41Attention,
    DeepseekV41Config,
    DeepseekV41DraftContext,
    TensorParallel,
    V41Options,
    build_layer,
    build_v41_draft_context,
    build_v41_layer,
    held_layers,
    random_layer_tensors,
    random_v41_draft_context_tensors,
    random_v41_layer_tensors,
    read_layer_tensors,
    read_v41_draft_context_tensors,
    read_v41_layer_tensors,
)
from cute_kernels.layers.caches import INDEX_CACHES, KV_CACHES
from cute_kernels.layers.config import read_json
from cute_kernels.layers.context import KV_FORMS
from cute_kernels.layers.mla import PREFILL_FORMS
from cute_kernels.layers.parallel import INDEXER_FORMS
from cute_kernels.layers.v41_config import is_v41
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ops import FALLBACK_VARIABLE

MODELS: Mapping[str, DeepseekV4Config | DeepseekV41Config] = {**PRESETS, **V41_PRESETS}
ROOT = Path(__file__).resolve().parent.parent
SAMPLE_TEXT = ROOT / "scripts" / "data" / "sample.txt"
TEXT_PREFILL = 400
TEXT_BATCH = 3
LONGEST_DRAFT = 1024


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line, without the usage; of several processes one does."""

    def error(self, message: str) -> NoReturn:
        if own_rank():
            self.exit(2)
        self.exit(2, f"{self.prog}: error: {message}\n")


def integer(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument type: whole numbers from `least` to `most`, by default what int32 holds."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {most}, got {text}")
        return value

    parse.__name__ = "integer"
    return parse


positive, natural = integer(1), integer(0)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="run_layer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    weights = parser.add_argument_group("weights")
    source = weights.add_mutually_exclusive_group()
    source.add_argument("--model", choices=sorted(MODELS), default="v4-flash", help="seeded weights (v4-flash)")
    source.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="config.json and *.safetensors as published, at their own width"
    )
    weights.add_argument(
        "--full-width", action="store_true", help="seeded weights at the published width instead of a reduced one"
    )
    weights.add_argument("--layer", type=int, metavar="N", help="this layer only (one of each kind)")
    weights.add_argument("--wo-a", choices=("fp8", "bf16"), help="seeded weights: storage of wo_a (fp8)")

    inputs = parser.add_argument_group("input")
    stream = inputs.add_mutually_exclusive_group()
    stream.add_argument(
        "--text", type=Path, metavar="FILE", default=SAMPLE_TEXT,
        help="one token per byte, a paragraph per request (a text that ships with this script)",
    )  # fmt: skip
    stream.add_argument(
        "--hidden-states", type=Path, metavar="FILE.npy",
        help="float32 [tokens, hidden], the layer's input after attn_norm; further requests take shorter prefixes",
    )  # fmt: skip
    inputs.add_argument(
        "--prefill", type=positive, metavar="P",
        help=f"most prefill tokens per request ({TEXT_PREFILL} for a text, no limit for hidden states)",
    )  # fmt: skip
    inputs.add_argument("--decode", type=natural, default=8, metavar="D", help="decode steps per request (8)")
    inputs.add_argument(
        "--batch", type=positive, metavar="B", help=f"requests ({TEXT_BATCH} for a text, 1 for hidden states)"
    )
    inputs.add_argument(
        "--chunk", type=positive, default=256, metavar="C", help="most prefill tokens per step over the batch (256)"
    )
    inputs.add_argument(
        "--draft", type=integer(1, LONGEST_DRAFT), default=1, metavar="N",
        help="query tokens per decode step, of which a seeded number is accepted (1)",
    )  # fmt: skip

    form = parser.add_argument_group("layer options")
    form.add_argument(
        "--kv-cache", choices=tuple(KV_CACHES | V41_KV_CACHES), default="fp8_ds_mla",
        help="cache format, of V4.1 of windows and entries (fp8_ds_mla)",
    )  # fmt: skip
    form.add_argument("--index-cache", choices=tuple(INDEX_CACHES), default="fp8", help="indexer key format (fp8)")
    form.add_argument("--index-hadamard", action="store_true", help="rotate indexer queries and keys")
    form.add_argument(
        "--index-topk", type=positive, metavar="K", help="entries the indexer keeps (the config's; 16 at reduced width)"
    )
    form.add_argument(
        "--prefill-form", choices=PREFILL_FORMS, default="gathered", help="for fp8_ds_mla caches (gathered)"
    )

    several = parser.add_argument_group("several processes")
    several.add_argument(
        "--tp", type=positive, metavar="T", default=1, help="tensor-parallel ranks, a divisor of the output groups (1)"
    )
    several.add_argument(
        "--tp-indexer", choices=INDEXER_FORMS, default="auto",
        help="whether ranks divide the rows that the indexer scores (auto)",
    )  # fmt: skip
    several.add_argument(
        "--cp", type=positive, metavar="C", default=1,
        help="ranks that divide the rows of prefills, for each of T; decode rows are on all of them (1)",
    )  # fmt: skip
    several.add_argument(
        "--cp-kv", choices=KV_FORMS, default="sharded", help="where those C ranks have the requests' entries (sharded)"
    )
    several.add_argument(
        "--dcp", type=positive, metavar="D", default=1,
        help="among the T ranks, so many neighbours share out the requests' entries (1)",
    )  # fmt: skip

    run = parser.add_argument_group("run")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    run.add_argument(
        "--fallback", choices=("reference", "none"), default="reference",
        help="on CUDA, what to do without a kernel for a call: run the reference, or stop (reference)",
    )  # fmt: skip
    run.add_argument("--seed", type=natural, default=0, help="of weights, embedding, page order and drafts (0)")
    run.add_argument(
        "--dump", type=Path, metavar="FILE.npz",
        help="write the first request's kv, comp, idx_k, topk, q, idx_q, o_raw, o, lse, oa, out and hidden_states",
    )  # fmt: skip
    run.add_argument("--json", type=Path, metavar="FILE", help="write the table and the checks as JSON")
    run.add_argument("--html", type=Path, metavar="FILE", help="write a picture of where time and bytes go")
    args = parser.parse_args(argv)

    for flag, given in (("--wo-a", args.wo_a is not None), ("--full-width", args.full_width)):
        if args.checkpoint is not None and given:
            parser.error(f"argument {flag}: only for seeded weights, not allowed with --checkpoint")
    if args.tp > 1 and args.dump is not None:
        parser.error("argument --dump: not allowed with --tp, whose ranks have some of the heads each")
    if args.cp > 1 and args.dump is not None:
        parser.error("argument --dump: not allowed with --cp, whose ranks have some of the rows each")
    if args.cp > 1 and args.dcp > 1:
        parser.error("argument --dcp: not allowed with --cp, whose ranks share out the entries already")
    if args.tp % args.dcp:
        parser.error(f"argument --dcp: expected a divisor of the {args.tp} ranks of --tp, got {args.dcp}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda: this machine has no usable CUDA device")
    for flag, path in (("--dump", args.dump), ("--json", args.json), ("--html", args.html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"argument {flag}: {path} is not a file in an existing directory")
        if path is not None and not can_write(path):
            parser.error(f"argument {flag}: cannot write {path}")
    text = args.hidden_states is None
    args.prefill = args.prefill or (TEXT_PREFILL if text else None)
    args.batch = args.batch or (TEXT_BATCH if text else 1)
    return args


def can_write(path: Path) -> bool:
    """Whether a file may be made, or written again, where `path` is. Permissions do not tell it all: a file is made."""
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            return not path.exists() or os.access(path, os.W_OK)
    except OSError:
        return False


def read_config(args: argparse.Namespace) -> DeepseekV4Config | DeepseekV41Config:
    config: DeepseekV4Config | DeepseekV41Config
    if args.checkpoint is not None:
        if not args.checkpoint.is_dir():
            raise CheckpointError(f"checkpoint: {args.checkpoint} is not a directory")
        config = config_of(read_json(args.checkpoint / "config.json"))
    else:
        config = MODELS[args.model] if args.full_width else MODELS[args.model].reduced()
    if isinstance(config, DeepseekV41Config):
        for flag, refused in (
            ("--tp", args.tp > 1),
            ("--cp", args.cp > 1),
            ("--wo-a", args.wo_a is not None),
            ("--kv-cache", args.kv_cache not in V41_KV_CACHES),
            ("--index-hadamard", args.index_hadamard),
            ("--prefill-form", args.prefill_form != "gathered"),
            ("--dump", args.dump is not None),
        ):
            if refused:
                raise InputError(f"{flag}: layers of V4.1 do not take it")
    elif args.kv_cache not in KV_CACHES:
        raise InputError("--kv-cache: V4.1's own records are for its layers")
    elif config.o_groups % args.tp:
        raise InputError(f"--tp: expected a divisor of the {config.o_groups} output groups, got {args.tp}")
    else:
        check_context(args, config)
    return config if args.index_topk is None else replace(config, index_topk=args.index_topk)


def check_context(args: argparse.Namespace, config: DeepseekV4Config) -> None:
    """Whether ranks can share out what --cp and --dcp say."""
    heads, is_sharded = config.num_attention_heads // args.tp, args.cp_kv == "sharded"
    if args.cp > 1 and is_sharded and heads % args.cp:
        raise InputError(f"--cp: expected a divisor of the {heads} heads of a rank, got {args.cp}")
    if (args.dcp > 1 or (args.cp > 1 and is_sharded)) and args.kv_cache != "fp8_ds_mla":
        flag = "--dcp" if args.dcp > 1 else "--cp-kv sharded"
        raise InputError(f"{flag}: expected --kv-cache fp8_ds_mla, got {args.kv_cache}")


def config_of(raw: dict[str, Any]) -> DeepseekV4Config | DeepseekV41Config:
    """Of a parsed config.json, by its model_type."""
    return DeepseekV41Config.from_dict(raw) if is_v41(raw) else DeepseekV4Config.from_dict(raw)


def choose_layers(args: argparse.Namespace, config: DeepseekV4Config | DeepseekV41Config) -> list[int]:
    ratios = config.compress_ratios
    if args.layer is not None:
        if not 0 <= args.layer < len(ratios):
            raise InputError(f"--layer: expected 0..{len(ratios) - 1}, got {args.layer}")
        if isinstance(config, DeepseekV4Config):
            return [args.layer]
    candidates: Sequence[int] = range(len(ratios))
    if args.checkpoint is not None:
        first_draft = config.num_hidden_layers if isinstance(config, DeepseekV41Config) else None
        candidates = [index for index in held_layers(args.checkpoint, first_draft) if index < len(ratios)]
        if not candidates:
            raise CheckpointError(f"checkpoint: {args.checkpoint} holds no tensor named layers.N.attn.*")
    if isinstance(config, DeepseekV41Config):
        return v41.chosen_layers(config, args.layer, candidates if args.checkpoint is not None else None)
    layers = [next((i for i in candidates if ratios[i] == ratio), None) for ratio in KINDS]
    chosen = [index for index in layers if index is not None]
    if args.dump is not None and len(chosen) > 1:
        raise InputError(f"--dump: needs --layer N, one of {len(chosen)} layers would be lost otherwise")
    return chosen


def read_requests(args: argparse.Namespace, config: DeepseekV4Config | DeepseekV41Config) -> list[Request]:
    if args.hidden_states is not None:
        sequences = array_sequences(args.hidden_states, args.batch, config.hidden_size)
    else:
        longest = args.prefill + args.decode * args.draft
        sequences = text_sequences(args.text, args.batch, config.hidden_size, args.seed, longest)
    requests = make_requests(
        sequences,
        prefill_limit=args.prefill,
        decode=args.decode,
        draft=args.draft,
        max_positions=config.max_position_embeddings,
        seed=args.seed,
    )
    device = args.device
    return [replace(r, hidden_states=r.hidden_states.to(device), rejected=r.rejected.to(device)) for r in requests]


def make_layer(
    args: argparse.Namespace,
    config: DeepseekV4Config,
    index: int,
    requests: Sequence[Request],
    tp: TensorParallel,
    cp: ContextParallel | None,
) -> DeepseekV4MultiHeadLatentAttentionWrapper:
    if args.checkpoint is not None:
        tensors = read_layer_tensors(args.checkpoint, index, config)
    else:
        tensors = random_layer_tensors(config, index, args.seed, wo_a_quantized=args.wo_a != "bf16")
    options = AttentionOptions(
        kv_cache=args.kv_cache,
        index_cache=args.index_cache,
        index_hadamard=args.index_hadamard,
        prefill=args.prefill_form,
        max_model_len=max(request.reach for request in requests),
        max_num_tokens=max_rows(requests, args.chunk),
        tp=tp,
        cp=cp,
    )
    return build_layer(config, index, tensors, options=options, device=args.device)


def context_group(args: argparse.Namespace, ranks: Ranks) -> ContextParallel | None:
    """How this rank's context group shares out requests, if it has one."""
    if ranks.cp is None:
        return None
    if args.dcp > 1:
        return ContextParallel(group=ranks.cp, kv="sharded", heads="own")
    return ContextParallel(group=ranks.cp, kv=args.cp_kv, prefill="zigzag")


def make_v41_layer(
    args: argparse.Namespace, config: DeepseekV41Config, index: int, requests: Sequence[Request]
) -> DeepseekV41Attention:
    if args.checkpoint is not None:
        tensors = read_v41_layer_tensors(args.checkpoint, index, config)
    else:
        tensors = random_v41_layer_tensors(config, index, args.seed)
    options = V41Options(
        kv_cache=args.kv_cache,
        index_cache=args.index_cache,
        max_model_len=max(request.reach for request in requests) + config.draft_block_size,
        max_num_tokens=max(max_rows(requests, args.chunk), len(requests) * config.draft_block_size),
    )
    return build_v41_layer(config, index, tensors, options=options, device=args.device)


def make_draft_context(
    args: argparse.Namespace, config: DeepseekV41Config, indices: Sequence[int]
) -> DeepseekV41DraftContext | None:
    """What the draft's layers among these need."""
    if not set(indices) & set(config.draft_layer_ids):
        return None
    if args.checkpoint is not None:
        tensors = read_v41_draft_context_tensors(args.checkpoint, config)
    else:
        tensors = random_v41_draft_context_tensors(config, args.seed)
    return build_v41_draft_context(config, tensors, device=args.device)


def kernels_of_run(
    args: argparse.Namespace,
    config: DeepseekV4Config | DeepseekV41Config,
    indices: Sequence[int],
    requests: Sequence[Request],
) -> list[KernelKey]:
    """Keys of the kernels that layers of one process launch, each once; of layers that are made for that alone."""
    run = {"chunk": args.chunk, "device": args.device, "seed": args.seed}
    if isinstance(config, DeepseekV41Config):
        stack = [make_v41_layer(args, config, index, requests) for index in indices]
        context = make_draft_context(args, config, indices)
        return kernels_of(lambda: v41.run_stack(stack, requests, draft_context=context, **run))
    one = TensorParallel()
    found = [
        kernels_of_layer(make_layer(args, config, index, requests, one, None), requests, **run) for index in indices
    ]
    return list(dict.fromkeys(key for of_layer in found for key in of_layer))


def introduce(
    args: argparse.Namespace,
    config: DeepseekV4Config | DeepseekV41Config,
    device_name: str,
    kinds: Sequence[str],
    requests: Sequence[Request],
) -> list[str]:
    published = None
    if args.checkpoint is not None:
        weights = str(args.checkpoint)
    elif args.full_width:
        weights = f"seeded (--seed {args.seed}), {args.model} at its published width"
    else:
        weights, published = f"seeded (--seed {args.seed}), {args.model} at a reduced width", MODELS[args.model]
    is_text = args.hidden_states is None
    source = args.text if is_text else args.hidden_states
    if source.is_relative_to(ROOT):
        source = source.relative_to(ROOT)
    return explain.introduction(kinds, device_name, weights, config, published, source, is_text, requests)


def print_report(
    console: Console,
    report: LayerReport,
    roofs: Mapping[str, float] | None,
    on_gpu: bool,
    config: DeepseekV4Config | DeepseekV41Config,
) -> None:
    title = f"layer {report.layer_index} ({report.kind})"
    console.print(render(report.rows, title, on_gpu))
    if report.steps:
        console.print(render_steps(report.steps, roofs))
        console.print(render_launches(report.steps[-1]))
    if report.exchanged is not None:
        console.print(render_exchanged(report.exchanged))
    if report.truncated is not None:
        print(explain.truncation(report.truncated, config.index_topk))
    if report.restricted is not None:
        assert isinstance(config, DeepseekV41Config)
        print(explain.restriction(report.restricted, config))
    for check in report.checks:
        print(f"{'PASS' if check.passed else 'FAIL'} {check.name} ({check.detail})")
    print(flush=True)


def report_as_json(report: LayerReport, roofs: Mapping[str, float] | None, on_gpu: bool) -> dict[str, Any]:
    values: dict[str, Any] = {
        "layer": report.layer_index,
        "kind": report.kind,
        "ops": [row.as_json(on_gpu) for row in report.rows],
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in report.checks],
    }
    if report.steps:
        values["steps"] = [step_as_json(step, roofs) for step in report.steps]
    if report.exchanged is not None:
        values["exchanged"] = report.exchanged
    if report.truncated is not None:
        values["rows_truncated_by_topk"], values["rows"] = report.truncated
    if report.restricted is not None:
        values["rows_cut_by_candidates"] = report.restricted[0]
    return values


def run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    """Everything after the arguments; returns the exit status. ranks: of several processes, this one's place."""
    start = time.perf_counter()
    on_gpu = args.device == "cuda"
    if on_gpu:
        os.environ[FALLBACK_VARIABLE] = args.fallback
    device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
    roofs = CEILINGS.get(device_name)
    config = read_config(args)
    indices = choose_layers(args, config)
    requests = read_requests(args, config)
    one = TensorParallel()
    tp = one if ranks is None else TensorParallel(group=ranks.tp, indexer=args.tp_indexer)
    cp = None if ranks is None else context_group(args, ranks)
    layers: list[DeepseekV4MultiHeadLatentAttentionWrapper] = []
    stack: list[DeepseekV41Attention] = []
    draft_context: DeepseekV41DraftContext | None = None
    if isinstance(config, DeepseekV41Config):
        stack = [make_v41_layer(args, config, index, requests) for index in indices]
        draft_context = make_draft_context(args, config, indices)
        kinds = [v41.kind_name(config, index) for index in indices]
    else:
        layers = [make_layer(args, config, index, requests, tp, cp) for index in indices]
        kinds = [KINDS[layer.compress_ratio] for layer in layers]

    # A narrow terminal wraps lines itself; cut numbers would be worse.
    console = Console(width=max(Console().width, 120) if sys.stdout.isatty() else 150)
    introduction = introduce(args, config, device_name, kinds, requests)
    sizes = [layer.weight_bytes for layer in stack if layer.weight_bytes is not None]
    if sizes:
        stored, kept = (format_bytes(sum(getattr(s, name) for s in sizes)) for name in ("stored", "kept"))
        introduction.append(
            f"FP8 weights are expanded to bf16, exactly: {stored} as a checkpoint has them, {kept} here."
        )
    words = explain.legend(config)
    print("\n".join([*introduction, "", *words, ""]), flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_quiet = not sys.stderr.isatty() or (ranks is not None and not ranks.speaks)
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=is_quiet)
    if on_gpu and ranks is None:
        said = compile_ahead(kernels_of_run(args, config, indices, requests), bar)
        if said is not None:
            print(f"{said}\n", flush=True)
    steps = count_steps(requests, args.chunk, args.device, args.dump is not None)
    reports = []
    if stack:
        with bar:
            task = bar.add_task("layers", total=v41.count_steps(len(stack), requests, args.chunk, args.device))
            reports = v41.run_stack(
                stack,
                requests,
                chunk=args.chunk,
                device=args.device,
                seed=args.seed,
                draft_context=draft_context,
                on_step=lambda: bar.advance(task),
            )
        for report in reports:
            print_report(console, report, roofs, on_gpu, config)
    for layer in layers:
        whole = None
        if ranks is not None:
            layer.verify_ranks()
            if ranks.speaks:
                assert isinstance(config, DeepseekV4Config)
                by_itself = make_layer(args, config, layer.layer_index, requests, one, None)
                whole = run_once(by_itself, requests, args.chunk, args.device, args.seed)
                del by_itself
                ranks.tell(f"whole/{layer.layer_index}")
            ranks.wait_for(f"whole/{layer.layer_index}")
        with bar:
            task = bar.add_task(f"layer {layer.layer_index}", total=steps)
            report = run_layer(
                layer,
                requests,
                chunk=args.chunk,
                device=args.device,
                seed=args.seed,
                dump=args.dump is not None,
                on_step=lambda task=task: bar.advance(task),  # type: ignore[misc]
                ranks=ranks,
                whole=whole,
            )
            bar.remove_task(task)
        print_report(console, report, roofs, on_gpu, config)
        if report.arrays is not None:
            write_dump(args.dump, report.arrays)
        reports.append(report)

    checks = [check for report in reports for check in report.checks]
    failed = sum(not check.passed for check in checks)
    tokens = sum(request.length for request in requests)
    plural = "s" * (len(reports) > 1)
    seconds = time.perf_counter() - start
    print(
        f"{len(checks) - failed} of {len(checks)} checks passed: {len(reports)} layer{plural}, {tokens} tokens each, "
        f"{sum(row.calls for report in reports for row in report.rows)} calls of ops in {seconds:.0f} s"
        + (f", {ranks.size} ranks" if ranks is not None else "")
    )
    print("\nNext:", *explain.next_steps(args.device, torch.cuda.is_available()), sep="\n  ")
    if ranks is not None and not ranks.speaks:
        return 1 if failed else 0
    if args.html is not None:
        args.html.write_text(draw(introduction, words, reports, on_gpu), encoding="utf-8")
    if args.json is not None:
        document = {
            "device": device_name,
            "weights": str(args.checkpoint or args.model),
            "hidden_size": config.hidden_size,
            "requests": [{"prefill": r.prefill, "decode": list(r.decode), "draft": r.draft} for r in requests],
            "layers": [report_as_json(report, roofs, on_gpu) for report in reports],
            "passed": failed == 0,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


def is_defect(error: Exception, fallback: str) -> bool:
    """Whether an error says that the program is wrong, rather than what it was given or the machine's memory."""
    if isinstance(error, NotImplementedError):
        return fallback != "none"
    # torch has a class for a full GPU only.
    full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return isinstance(error, RuntimeError) and not full


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    ranks: Ranks | None = None
    try:
        size = args.tp * args.cp
        if size > 1 and own_rank() is None:
            read_config(args)
            if args.device == "cuda":
                check_gpus(size, "--tp" if args.cp == 1 else "--tp * --cp")
            return start(Path(__file__).resolve(), sys.argv[1:] if argv is None else argv, size)
        if size > 1:
            if own_rank():
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 for as long as the process runs
            ranks = join(args.tp, args.cp, args.dcp, args.device)
        status = run(args, ranks)
        if ranks is not None:
            ranks.leave()
        return status
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing may be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CommunicatorError as error:
        # Whoever made the collective fail knows why.
        say(f"error: {(ranks.failure() if ranks is not None and ranks.speaks else None) or error}")
        return 1
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # ValueError is what configs, checkpoints, inputs and ops raise for what they cannot take, and
        # NotImplementedError what an op without a kernel raises under --fallback none. Any other is a defect.
        text = " ".join(str(error).split())
        if ranks is not None and not ranks.speaks:
            ranks.report_failure(text)
        if is_defect(error, args.fallback):
            raise
        say(f"error: {text}")
        return 2


def say(text: str) -> None:
    """A line to stderr, from one of several processes."""
    if not own_rank():
        print(f"run_layer.py: {text}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())

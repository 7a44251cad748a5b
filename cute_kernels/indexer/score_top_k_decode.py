"""score_top_k_decode on a GPU: chunk after chunk, the kernel of paged_mqa_logits, then that of top_k_per_row_decode."""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_kernels.indexer import chunks, paged_logits, topk
from cute_kernels.indexer.call import PagedLogitsCall
from cute_kernels.indexer.topk_decode import bounds, slots


def deployment_keys(config: Any, tp: int, arch: str) -> list[Any]:
    """Those of scores and picks, where there are scores."""
    keys = paged_logits.deployment_keys(config, tp, arch)
    return [*keys, *topk.deployment_keys(config, tp, arch)] if keys else []


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    q_scale: Any
    kv_cache: Any
    weights: Any
    context_lens: Any
    block_tables: Any
    max_model_len: int
    kv_format: str
    out: Any
    workspace: Any
    slot_block_table: Any
    slot_rows_per_page: int

    def walk(self) -> Any:
        requests, next_n = self.q.shape[:2]
        return chunks.walk(self.workspace, requests, self.max_model_len, next_n, self.out, self.weights.dtype)

    def requests(self, first: int, last: int) -> Call:
        """The call of some requests."""
        requests, next_n = self.q.shape[:2]
        if last - first == requests:
            return self
        own, rows = slice(first, last), slice(first * next_n, last * next_n)
        cut = {name: getattr(self, name)[own] for name in ("q", "context_lens", "block_tables")}
        cut |= {name: getattr(self, name)[rows] for name in ("weights", "out")}
        optional = {name: getattr(self, name) for name in ("q_scale", "slot_block_table")}
        cut |= {name: None if value is None else value[own] for name, value in optional.items()}
        return self._replace(**cut)

    def scores(self, out: Any) -> PagedLogitsCall:
        """The call of paged_mqa_logits."""
        cache = self.kv_cache, self.weights, self.context_lens, self.block_tables, self.max_model_len
        return PagedLogitsCall(self.q, self.q_scale, *cache, False, self.kv_format, out)


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    call = Call(*args)
    for first, last, scores, _ in call.walk():
        why = call.requests(first, last).scores(scores).why_not()
        return (False, why) if why else topk.check(scores, scores.shape[0], call.out.shape[1])
    return True, ""


def launch(*args: Any) -> None:
    """Run the kernels on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    call = Call(*args)
    k = call.out.shape[1]
    for first, last, scores, is_scored in call.walk():
        part = call.requests(first, last)
        if is_scored:
            paged_logits.run(part.scores(scores), skip=k, op="score_top_k_decode")
        starts, ends = bounds(part.context_lens)
        places = slots(part.slot_block_table, part.slot_rows_per_page)
        topk.run(scores, starts, ends, part.out, scores.shape[0], k, slots=places)

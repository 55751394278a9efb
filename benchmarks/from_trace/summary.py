"""From both profiles and the measured steps to differences. Pure arithmetic."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.samples import by_rank, slower, spread
from megatron_lancet.files.reader import from_plain
from megatron_lancet.planning.profile import OpTime, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind

WANTED = 0.03
"""Of what our profiler measures."""
SMALL_MS = 0.25
"""An op or message within this difference counts as equal: it is less than the profilers' own cost."""
_STOCK = "stock"
_step_ms = slower("step_ms")


@dataclass(frozen=True)
class Pair:
    """A figure of both profiles.

    Attributes:
        name: of the op or message.
        own_ms: our profiler's.
        trace_ms: time of the traces.
        times: how often it is in a step.
    """

    name: str
    own_ms: float
    trace_ms: float
    times: int = 1

    @property
    def difference(self) -> float:
        """Relative to our profiler's."""
        return self.trace_ms / self.own_ms - 1 if self.own_ms > 0 else 0.0

    @property
    def is_equal(self) -> bool:
        """Whether it is as near as wanted."""
        return abs(self.trace_ms - self.own_ms) <= max(SMALL_MS, WANTED * self.own_ms)


@dataclass(frozen=True)
class Predicted:
    """A configuration; errors are relative to the measured step, above 0 if too long was predicted."""

    name: str
    measured_ms: float
    low_ms: float
    high_ms: float
    own_ms: float
    trace_ms: float

    @property
    def own_error(self) -> float:
        """Of the prediction from our profile."""
        return self.own_ms / self.measured_ms - 1

    @property
    def trace_error(self) -> float:
        """Of the prediction from the traces."""
        return self.trace_ms / self.measured_ms - 1


@dataclass(frozen=True)
class CaseSummary:
    """One case.

    Attributes:
        whole: ops of unchunked micro-batches, each weight gradient included.
        chunks: ops of chunks, which a trace of stock does not have.
        messages: by what is sent.
    """

    name: str
    title: str
    rate_bps: float
    is_disturbed: bool
    num_repeats: int
    stock_ms: float
    whole: tuple[Pair, ...]
    chunks: tuple[Pair, ...]
    messages: tuple[Pair, ...]
    predicted: tuple[Predicted, ...]

    @property
    def total(self) -> Pair:
        """All compute of a step without chunks."""
        own, trace = (sum(ms * pair.times for pair, ms in self._both(which)) for which in ("own_ms", "trace_ms"))
        return Pair("all compute", own, trace)

    def _both(self, which: str) -> list[tuple[Pair, float]]:
        return [(pair, getattr(pair, which)) for pair in self.whole]


def compare(case: Mapping[str, Any]) -> CaseSummary:
    """The figures of a case of the JSON file."""
    own, trace = (from_plain(Profile, case[f"{which}_profile"], which) for which in ("own", "trace"))
    times = {which: _medians(case, which) for which in case["samples"]}
    pairs = _op_pairs(own, trace)
    return CaseSummary(
        name=case["name"],
        title=case["title"],
        rate_bps=case["rate_bps"],
        is_disturbed=case["disturbance"]["is_disturbed"],
        num_repeats=len(case["samples"][_STOCK]),
        stock_ms=times[_STOCK].median,
        whole=tuple(pair for chunks, pair in pairs if chunks == 1),
        chunks=tuple(pair for chunks, pair in pairs if chunks > 1),
        messages=_message_pairs(own, trace),
        predicted=tuple(
            Predicted(
                name,
                times[name].median,
                times[name].low,
                times[name].high,
                case["own_predictions"][name]["step_ms"],
                case["trace_predictions"][name]["step_ms"],
            )
            for name in case["plans"]
        ),
    )


def _medians(case: Mapping[str, Any], name: str) -> Any:
    return spread([_step_ms(ranks) for ranks in by_rank(case["sample_fields"], case["samples"][name])])


def _op_pairs(own: Profile, trace: Profile) -> list[tuple[int, Pair]]:
    """Ops and weight gradients that both have, with their chunk counts. Experts' times are for rows of equal number."""
    times = Counter(own.model.layer_kinds) | Counter([LayerKind.NONE])
    found = []
    read = {_key(op): op for op in trace.ops}
    for op in own.ops:
        other = read.get(_key(op))
        if other is None or not times[op.layer_kind]:
            continue
        ms = other.ms
        if op.kind == OpKind.EXPERTS and other.rows:
            ms *= op.rows / other.rows
        cut = "" if op.num_chunks == 1 else f" {op.chunk_dim} {op.chunk + 1}/{op.num_chunks}"
        name = f"{op.phase} {op.kind}{cut}"
        found.append((op.num_chunks, Pair(name, op.ms, ms, times[op.layer_kind])))
    weights = {(dw.layer_kind, dw.name, dw.num_chunks): dw for dw in trace.weight_grads}
    for dw in own.weight_grads:
        also = weights.get((dw.layer_kind, dw.name, dw.num_chunks))
        if also is not None and times[dw.layer_kind]:
            ms = also.ms * (dw.rows / also.rows if also.rows else 1)
            cut = "" if dw.num_chunks == 1 else f" 1/{dw.num_chunks}"
            found.append((dw.num_chunks, Pair(f"W {dw.name}{cut}", dw.ms, ms, times[dw.layer_kind])))
    return found


def _key(op: OpTime) -> tuple[object, ...]:
    return (op.layer_kind, op.kind, op.phase, op.chunk_dim, op.num_chunks, op.chunk, op.dispatch)


def _message_pairs(own: Profile, trace: Profile) -> tuple[Pair, ...]:
    """Messages of the sizes of a step with and without chunks, as each profile prices them."""
    model = own.model
    costs = CostModel(own), CostModel(trace)
    sent = model.num_rows * (model.ep_size - 1) // model.ep_size
    found = []
    for count in (1, 2, 4):
        for kind, row_bytes in ((OpKind.DISPATCH, model.row_bytes), (OpKind.COMBINE, model.combine_row_bytes)):
            own_ms, trace_ms = (one.message_ms(sent // count * row_bytes, kind) for one in costs)
            found.append(Pair(f"{kind}, {sent // count} rows", own_ms, trace_ms))
    return (*found, Pair(OpKind.COUNTS.value, own.link.counts_ms, trace.link.counts_ms))


def median_difference(pairs: Sequence[Pair]) -> float:
    """Median of the absolute relative differences."""
    return statistics.median(abs(pair.difference) for pair in pairs)

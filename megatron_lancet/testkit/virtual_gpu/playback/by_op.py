"""What was played by op: a timeline, and the kernels of each op. Both need the marks of a :class:`MarkedTrace`."""

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_lancet.runtime.trace_log import Entry as TraceEntry
from megatron_lancet.runtime.trace_log import What, spans_of
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, CollectiveEnds, Entry, Kernel, Mark
from megatron_lancet.testkit.virtual_gpu.playback.marks import (
    BEGIN,
    END,
    RESUME,
    SKIP,
    TURN_BEGINS,
    TURN_ENDS,
    MarkedMessage,
)
from megatron_lancet.testkit.virtual_gpu.playback.player import Playback

BESIDE_OPS = ""
"""Stands for the op of kernels behind the last mark."""

_WHAT = {END: What.END, SKIP: What.SKIP, BEGIN: What.CUT, RESUME: What.RESUME}


def timeline_of(played: Playback, messages: Iterable[MarkedMessage]) -> RankTimeline:
    """The timeline of rank 0, like a real step's: ops and waits of the compute stream, and messages."""
    spans = _spans(played.marks)
    for one in messages:
        start_us, end_us = (played.events_us[event] for event in (one.start_event, one.end_event))
        spans.append(Span(one.name, Lane.COMM, start_us / 1e3, end_us / 1e3, one.num_bytes))
    spans.sort(key=lambda span: (span.start_ms, span.end_ms))
    return RankTimeline(0, tuple(spans), played.step_us / 1e3)


def host_spans(played: Playback) -> tuple[Span, ...]:
    """The ops and waits by the clock of the host, as in a real step's trace."""
    marks = (mark for mark, _ in played.marks)
    return tuple(_spans(zip(marks, played.marks_on_host_us, strict=True)))


def _spans(marks: Iterable[tuple[Mark, float]]) -> list[Span]:
    own: list[TraceEntry] = []
    of_turns: list[TraceEntry] = []
    is_turn = False
    for mark, at_us in marks:
        at_ms = at_us / 1e3
        if mark.kind in (TURN_BEGINS, TURN_ENDS):
            is_turn = mark.kind == TURN_BEGINS
            own.append(TraceEntry(What.LEAVE if is_turn else What.RETURN, "", at_ms))
            of_turns.append(TraceEntry(What.RETURN if is_turn else What.LEAVE, "", at_ms))
        else:
            (of_turns if is_turn else own).append(TraceEntry(_WHAT[mark.kind], mark.name, at_ms, _lane(mark)))
    return [*spans_of(own), *spans_of(of_turns)]


def _lane(mark: Mark) -> Lane:
    return Lane.COMPUTE if is_weight_grad(mark.name) else Lane.WAIT


def is_weight_grad(name: str) -> bool:
    """Whether an op's name names a weight gradient."""
    op = Op.find(name)
    return op is not None and op.phase is Phase.WEIGHT_GRAD


def kernels_by_op(log: Sequence[Entry]) -> Counter[str]:
    """Number of kernels of each op on all streams, by its name; kernels of collectives do not count."""
    found: Counter[str] = Counter()
    num_open, num_open_beside, weight_grad, collectives = 0, 0, None, set()
    for entry in log:
        match entry:
            case CollectiveBegins():
                collectives.add(entry.stream)
            case CollectiveEnds():
                collectives.discard(entry.stream)
            case Kernel() if entry.stream not in collectives:
                if weight_grad is not None:
                    found[weight_grad] += 1
                else:
                    num_open += 1
            case Mark(kind, name) if kind in (BEGIN, RESUME):
                if is_weight_grad(name):
                    weight_grad = name if kind == BEGIN else None
            case Mark(kind) if kind in (TURN_BEGINS, TURN_ENDS):
                num_open, num_open_beside = num_open_beside, num_open
            case Mark(kind, name):
                found[name] += num_open
                num_open = 0
    found[BESIDE_OPS] += num_open + num_open_beside
    return +found

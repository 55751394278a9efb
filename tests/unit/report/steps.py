"""Made-up steps for tests of what is written about steps."""

from megatron_lancet.report.timeline_record import TimelineRecord
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span


def step(
    rank: int, num_layers: int, num_chunks: int = 2, compute_ms: float = 1.0, late_ms: float = 0.3
) -> RankTimeline:
    """Chunks that compute in turn; each layer's dispatch and combine come ``late_ms`` after they are wanted."""
    spans = []
    now_ms = 0.0
    for phase, layers in (("F", range(1, num_layers + 1)), ("I", range(num_layers, 0, -1))):
        for layer in layers:
            for kind, op in (("dispatch", "attention"), ("combine", "experts")):
                for chunk in range(num_chunks):
                    name = f"L{layer}.c{chunk}.{phase}"
                    spans.append(Span(f"{name}.{op}", Lane.COMPUTE, now_ms, now_ms + compute_ms))
                    now_ms += compute_ms
                    end_ms = now_ms + (num_chunks - 1) * compute_ms + late_ms
                    spans.append(Span(f"{name}.{kind}", Lane.COMM, now_ms, end_ms, 1 << 20))
                wanted = f"L{layer}.c0.{phase}.{kind}"
                spans.append(Span(wanted, Lane.WAIT, now_ms, now_ms + late_ms))
                now_ms += late_ms
            if phase == "I":
                name = f"L{layer}.W.self_attention.linear_qkv"
                spans.append(Span(name, Lane.COMPUTE, now_ms, now_ms + compute_ms / 2))
                now_ms += compute_ms / 2
    spans.sort(key=lambda span: span.start_ms)
    return RankTimeline(rank, tuple(spans), now_ms + 1.0)


def record(num_layers: int = 4, num_ranks: int = 2, predicted: bool = True, title: str = "a step") -> TimelineRecord:
    return TimelineRecord(
        title=title,
        measured=tuple(step(rank, num_layers) for rank in range(num_ranks)),
        predicted=tuple(step(rank, num_layers, late_ms=0.2) for rank in range(num_ranks)) if predicted else (),
        before=tuple(step(rank, num_layers, num_chunks=1, late_ms=2.0) for rank in range(num_ranks)),
        reasons={"L1.c0.F.dispatch": "nothing left to run"},
    )

"""Facts and steps that nobody measured."""

from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.runtime.trace import StepTrace, WeightGradFacts
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

FACTS = ModelFacts(
    name="tiny",
    layer_kinds=(LayerKind.DENSE, LayerKind.MOE, LayerKind.MOE),
    stage_of_layer=(0, 0, 0),
    micro_batch_size=3,
    seq_length=10,
    num_micro_batches=2,
    topk=2,
    num_experts=4,
    ep_size=2,
    world_size=2,
    row_bytes=144,
    combine_row_bytes=128,
    counts_bytes=32,
)


def step(plan: Plan, slowness: float = 1.0) -> StepTrace:
    """Two micro-batches: chunk c of layer l takes (l + c / 10) * slowness ms; 5 ms of the step are neither."""
    spans: list[Span] = []
    now_ms = 1.0

    def add(name: str, ms: float, lane: Lane = Lane.COMPUTE) -> None:
        nonlocal now_ms
        spans.append(Span(name, lane, now_ms, now_ms + ms))
        now_ms += ms

    chunks = range(plan.num_chunks)
    for _ in range(FACTS.num_micro_batches):
        add("F.head", 0.5)
        for layer in (1, 2, 3):
            for chunk in chunks:
                kind = "mlp" if layer == 1 else "experts"
                add(f"L{layer}.c{chunk}.F.{kind}", (layer + chunk / 10) * slowness)
                # A wait cuts this one in two.
                add(f"L{layer}.c{chunk}.I.{kind}", (layer + chunk / 10) * slowness)
                add(f"L{layer}.c{chunk}.I.dispatch", 0.25, Lane.WAIT)
                add(f"L{layer}.c{chunk}.I.{kind}", (layer + chunk / 10) * slowness)
        for _ in chunks:
            add("L2.W.mlp.experts.local_experts.0.linear_fc1", 0.125)
        add("W.output_layer", 0.75)
    spans.append(Span("L2.c0.F.dispatch", Lane.COMM, 2.0, 4.0, 4096))
    rows = {f"L{layer}.c{chunk}.F.experts": (40, 44) for layer in (2, 3) for chunk in chunks}
    facts = {
        "L2.W.mlp.experts.local_experts.0.linear_fc1": WeightGradFacts((100,) * 4, 64),
        "W.output_layer": WeightGradFacts((900, 900), 512),
    }
    return StepTrace(RankTimeline(0, tuple(sorted(spans, key=lambda s: s.start_ms)), now_ms - 1.0 + 5.0), rows, facts)

"""Describes a plan in text: layers with the same treatment share a paragraph."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lancet.planning.plan_file import PlanFile
from megatron_lancet.schedule.ops import Op, Phase
from megatron_lancet.schedule.plan import ChunkDim, LocalTokens, OverlapRange, Plan, Segment
from megatron_lancet.schedule.ranges import parse_ranges, ranges

_PIECES = {ChunkDim.BATCH: "samples", ChunkDim.SEQUENCE: "positions"}
_RANGES = {
    OverlapRange.EXPERTS: "from dispatch to combine",
    OverlapRange.GATE: "from the router to combine",
    OverlapRange.STACK: "through all of them without waiting at a layer's end",
}

_LOCAL_TOKENS = {
    LocalTokens.HALF: "half of a rank's own before them and half behind",
    LocalTokens.AFTER: "a rank's own behind them",
    LocalTokens.TILED: "a rank's own among them",
}
LEGEND = "[+n] is a weight n layers further on; without it, of the layer itself"


@dataclass(frozen=True)
class LayerGroup:
    """Layers that a plan treats alike.

    Attributes:
        numbers: global layer numbers, ascending.
        kind: ``MoE``, ``dense``, or empty if unknown.
        gaps: lines such as ``c0.I.combine: mlp.experts[+1] x2``, with layers relative to the gap's own.
    """

    numbers: tuple[int, ...]
    kind: str
    segment: Segment
    gaps: tuple[str, ...]

    def __str__(self) -> str:
        text = f"layer{'s' if len(self.numbers) > 1 else ''} {ranges(self.numbers)}"
        return f"{text} ({self.kind})" if self.kind else text


def description(segment: Segment) -> str:
    """Describes how a segment cuts a micro-batch."""
    tiles = f"; {tiles_in_words(segment)}" if segment.tiles else ""
    if segment.num_chunks == 1:
        return f"the unchunked micro-batch{tiles}"
    multiple = f", multiples of {segment.chunk_multiple}" if segment.chunk_multiple > 1 else ""
    return (
        f"{segment.num_chunks} chunks of {_PIECES[segment.chunk_dim]} (dim {segment.chunk_dim}){multiple}, "
        f"{_RANGES[segment.range]} (range {segment.range}){tiles}"
    )


def tiles_in_words(segment: Segment) -> str:
    """Describes how the rows of a chunk go to other ranks, and when the experts work on the others."""
    parts = "1 tile" if segment.tiles == 1 else f"{segment.tiles} tiles"
    return f"rows of other ranks in {parts}, {_LOCAL_TOKENS[segment.local_tokens]}"


def layer_groups(content: PlanFile) -> list[LayerGroup]:
    """Returns the plan's layers in groups; without a model's number of layers, up to the last segment's first layer."""
    plan = content.plan
    end = plan.segments[-1]
    num_layers = end.last_layer or end.first_layer
    kinds: dict[int, str] = {}
    if content.made_for is not None:
        num_layers = content.made_for.num_layers
        moe = set(parse_ranges(content.made_for.moe_layers))
        kinds = {layer: "MoE" if layer in moe else "dense" for layer in range(1, num_layers + 1)}
    gaps = _gaps_by_layer(plan)
    groups: dict[tuple[str, Segment, tuple[str, ...]], list[int]] = {}
    for layer in range(1, num_layers + 1):
        treatment = (kinds.get(layer, ""), plan.segment_of(layer), tuple(gaps.get(layer, ())))
        groups.setdefault(treatment, []).append(layer)
    return [LayerGroup(tuple(numbers), *treatment) for treatment, numbers in groups.items()]


def _gaps_by_layer(plan: Plan) -> dict[int, list[str]]:
    lines: dict[int, list[str]] = {}
    for gap in plan.gaps:
        op = Op.find(gap.op)
        layer = op.layer or 0 if op is not None else 0
        name = gap.op if op is None else op.within_layer()
        counts = Counter(relative_weight_grad(grad, layer) for grad in gap.weight_grads)
        grads = ", ".join(grad if count == 1 else f"{grad} x{count}" for grad, count in counts.items())
        lines.setdefault(layer, []).append(f"{name}: {grads}")
    return lines


def relative_weight_grad(weight_grad: str, layer: int) -> str:
    """Abbreviates ``L4.W.mlp.experts`` in a gap of layer 3 to ``mlp.experts[+1]``."""
    op = Op.find(weight_grad)
    if op is None or op.phase is not Phase.WEIGHT_GRAD:
        return weight_grad
    if op.layer is None:
        return f"{op.kind}[head]"
    offset = op.layer - layer
    return f"{op.kind}[{offset:+d}]" if offset else op.kind


def head_lines(content: PlanFile) -> Iterator[str]:
    """Yields the model that the plan was made for, and its source."""
    if content.made_for is None:
        yield "made for: any model with these layers (the file does not say)"
    else:
        model = content.made_for
        stages = "1 pipeline stage" if model.num_stages == 1 else f"{model.num_stages} pipeline stages"
        predictions = f", the last {model.num_mtp_layers} multi-token prediction" if model.num_mtp_layers else ""
        layers = f"{model.num_layers} layers" + ("" if model.pattern is None else f" {model.pattern}")
        yield (
            f"made for: {layers} (MoE: {model.moe_layers}{predictions}) on {stages}, micro-batches of "
            f"{model.micro_batch_size} x {model.seq_length}, {model.num_experts} experts on {model.ep_size} ranks, "
            f"top-{model.topk}"
        )
    if content.source is not None:
        versions = ", ".join(f"{name} {version}" for name, version in content.source.versions.items())
        yield f"made from: a profile of {content.source.profile} on {content.source.device}" + (
            f" ({versions})" if versions else ""
        )
    yield "weight gradients: " + _dw_in_words(content.plan)
    if not content.plan.dispatch.is_plain:
        yield f"dispatch: {content.plan.dispatch}, {content.plan.dispatch.description}"
    if content.plan.is_paired:
        yield "pairing: each backward is paired with the forward of the next micro-batch"


def plan_lines(content: PlanFile) -> Iterator[str]:
    """Yields the plan of each group of layers, and the prediction."""
    exposed = {one.layer: one.exposed_ms for one in content.prediction.layers} if content.prediction else None
    for group in layer_groups(content):
        yield f"{group}: {description(group.segment)}"
        for line in group.gaps:
            yield f"    gap {line}"
        if exposed is not None and group.kind != "dense":
            yield "    " + _exposed_in_words([exposed.get(n, 0.0) for n in group.numbers])
    if content.plan.is_paired:
        yield from _end_lines(content)
    if any("[" in line for group in layer_groups(content) for line in group.gaps):
        yield LEGEND
    if content.prediction is not None:
        step = content.prediction
        yield (
            f"predicted: step {step.step_ms:.1f} ms, {step.no_overlap_step_ms:.1f} ms without overlap; exposed "
            f"{step.exposed_ms:.1f} ms; {step.peak_bytes / 1e6:.0f} MB of activations and deferred weight gradients"
        )


def _end_lines(content: PlanFile) -> Iterator[str]:
    """Yields how the micro-batches at the ends of a paired step run."""
    ends = content.plan.at_ends
    if ends == content.plan.in_middle:
        return
    yield "at the ends of a step, where a forward or a backward has no partner:"
    if ends.dw_window != content.plan.dw_window:
        yield f"    weight gradients: {_dw_in_words(ends)}"
    for group in layer_groups(replace(content, plan=ends)):
        yield f"    {group}: {description(group.segment)}"
        for line in group.gaps:
            yield f"        gap {line}"


def _dw_in_words(plan: Plan) -> str:
    if plan.dw_window == 0:
        return "not deferred"
    bound = "" if plan.dw_memory_bytes is None else f", of at most {plan.dw_memory_bytes / 1e6:g} MB"
    return f"run while backward all-to-alls are in flight, at most {plan.dw_window} of them later{bound}"


def _exposed_in_words(exposed_ms: list[float]) -> str:
    low, high = min(exposed_ms), max(exposed_ms)
    if high < 0.05:
        return "exposed: nothing"
    if len(exposed_ms) == 1:
        return f"exposed: {high:.1f} ms a step"
    each = f"{high:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
    return f"exposed: {each} ms a step in each layer, {sum(exposed_ms):.1f} ms together"

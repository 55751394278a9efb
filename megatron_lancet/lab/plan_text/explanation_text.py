"""Explains exposed messages in text: layers with the same treatment share a paragraph."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_lancet.lab.plan_text.plan_text import relative_weight_grad, tiles_in_words
from megatron_lancet.planning.explain import Explanation, LayerExplanation, Reason
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.ranges import ranges

_MAX_SEGMENTS_IN_LINE = 4


def short_text(plan: Plan) -> str:
    """Returns a plan as one line."""
    if len(plan.segments) <= _MAX_SEGMENTS_IN_LINE:
        return str(plan)
    dispatch = "" if plan.dispatch.is_plain else f" dispatch={plan.dispatch}"
    return f"{len(plan.segments)} segments, up to {plan.num_chunks} chunks; dw={plan.dw_policy}{dispatch}"


def layer_lines(explanation: Explanation) -> Iterator[str]:
    """Lists the dWs in the gaps of each group of layers, and what stays exposed; times are of one micro-batch."""
    for title, part in _parts(explanation):
        yield from title
        groups: dict[tuple[object, ...], list[LayerExplanation]] = {}
        for layer in part:
            treatment = (layer.layer_kind, layer.stage, str(layer.segment))
            groups.setdefault(treatment, []).append(layer)
        for layers in groups.values():
            yield from _paragraph(layers)


def each_layer(explanation: Explanation) -> Iterator[str]:
    """Yields the same with a paragraph for every layer."""
    for title, part in _parts(explanation):
        yield from title
        for layer in part:
            yield from _paragraph([layer])


def pairing_line(explanation: Explanation) -> str:
    """Says whether backwards are paired with forwards, and what the best other choice would take."""
    paired = "each backward is paired with the next forward"
    alone = "micro-batches run one after the other"
    chosen, other = (paired, alone) if explanation.plan.is_paired else (alone, paired)
    other_ms = other_pairing_ms(explanation)
    if other_ms is None:
        return f"pairing: {chosen}"
    return f"pairing: {chosen}; if {other}, the best plan takes {other_ms:.1f} ms"


def other_pairing_ms(explanation: Explanation) -> float | None:
    """Predicted step time of the best plan that is paired if this one is not, or the other way round, if one fits."""
    is_paired = explanation.plan.is_paired
    fitting = (one for one in explanation.others if one.fits and one.plan.is_paired != is_paired)
    return min((one.prediction.step_ms for one in fitting), default=None)


def dispatch_line(explanation: Explanation) -> str:
    """Says what all-to-alls carry, and what the same plan would take if they carried something else."""
    dispatch, others_ms = explanation.plan.dispatch, explanation.other_dispatches_ms
    text = f"dispatch: {dispatch}, {dispatch.description}"
    if not others_ms:
        return text
    others = [f"{step_ms:.1f} ms with {other} ({other.description})" for other, step_ms in others_ms.items()]
    return f"{text}; the same plan takes {', '.join(others)}"


def _parts(explanation: Explanation) -> Iterator[tuple[tuple[str, ...], Sequence[LayerExplanation]]]:
    """Yields the parts of a step with a line in front of each if there are two."""
    if not explanation.ends:
        yield (), explanation.layers
        return
    num_pairs = explanation.num_micro_batches - 1
    yield (f"a backward and the forward paired with it, {num_pairs} x a step:",), explanation.layers
    yield ("the first forward and the last backward of a step, which have no partner:",), explanation.ends


def _paragraph(layers: Sequence[LayerExplanation]) -> Iterator[str]:
    numbers = f"layer{'s' if len(layers) > 1 else ''} {ranges(layer.layer for layer in layers)}"
    segment = layers[0].segment
    is_whole = segment.num_chunks == 1
    cut = "one chunk" if is_whole else f"{segment.num_chunks} chunks, dim {segment.chunk_dim}, range {segment.range}"
    tiles = f", {tiles_in_words(segment)}" if segment.tiles and layers[0].layer_kind.has_experts else ""
    yield f"{numbers} ({layers[0].layer_kind}): {cut}{tiles}; exposed {_span([x.exposed_ms for x in layers])}"
    yield from _filled_lines(layers)
    yield from _exposed_lines(layers)


def reason_lines(explanation: Explanation) -> Iterator[str]:
    """Yields the exposed time of all layers for each reason, longest first."""
    for reason, ms in explanation.exposed_by_reason().items():
        yield f"{ms:10.1f} ms a step: {reason} ({reason.description})"


def _filled_lines(layers: Sequence[LayerExplanation]) -> Iterator[str]:
    """Lists the dWs that run while each message is in flight, and the number of layers in which they do."""
    by_message: dict[str, Counter[str]] = {}
    for layer in layers:
        for gap in layer.filled:
            names = {relative_weight_grad(name, layer.layer) for name in gap.weight_grads}
            by_message.setdefault(_without_layer(gap.op), Counter()).update(names)
    for message, counts in by_message.items():
        grads = ", ".join(
            name if count == len(layers) else f"{name} (in {count} of {len(layers)} layers)"
            for name, count in counts.most_common()
        )
        yield f"    {message} is filled with {grads}"


def _exposed_lines(layers: Sequence[LayerExplanation]) -> Iterator[str]:
    by_message: dict[tuple[str, Reason], list[float]] = {}
    for layer in layers:
        for message in layer.exposed:
            by_message.setdefault((_without_layer(message.op), message.reason), []).append(message.ms)
    for (op, reason), times_ms in by_message.items():
        where = "" if len(times_ms) == len(layers) else f" in {len(times_ms)} of {len(layers)} layers"
        yield f"    {op} is exposed {_span(times_ms)}{where}: {reason} ({reason.description})"


def _without_layer(name: str) -> str:
    op = Op.find(name)
    return name if op is None else op.within_layer()


def _span(times_ms: Sequence[float]) -> str:
    low, high = f"{min(times_ms):.2f}", f"{max(times_ms):.2f}"
    return f"{high} ms" if low == high else f"{low} to {high} ms"

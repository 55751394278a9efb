"""Plans in words, for readers who do not know their syntax."""

from megatron_lancet.schedule.dispatch import LocalTokens
from megatron_lancet.schedule.plan import DwPolicy, OverlapRange, Plan, Segment

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
_RANGES = {
    OverlapRange.STACK: "",
    OverlapRange.GATE: " from the router to the combine",
    OverlapRange.EXPERTS: " from the dispatch to the combine",
}
_LOCAL_TOKENS = {
    LocalTokens.HALF: "half of the local tokens during the dispatch",
    LocalTokens.AFTER: "local tokens during the combine",
    LocalTokens.TILED: "local tokens in the tiles",
}


def plan_in_words(plan: Plan) -> str:
    """Describes all settings of a plan but the dWs of single gaps, in one line without its end."""
    parts = ["no overlap"] if plan.overlaps_nothing else _segments(plan.segments)
    if not plan.dispatch.is_plain:
        parts.append(f"one row per token and {plan.dispatch.receiver}")
    if plan.dw_policy is DwPolicy.FILL:
        parts.append(f"weight gradients deferred by up to {_count(plan.dw_window, 'all-to-all')}")
    elif not plan.overlaps_nothing:
        parts.append("weight gradients at once")
    if plan.dw_memory_bytes is not None:
        parts.append(f"which keep at most {plan.dw_memory_bytes / 1e6:g} MB")
    if plan.fused_attention:
        parts.append("fused attention")
    if plan.pairing is not None:
        parts.append("each backward beside the next forward")
        ends = plan.at_ends
        if (ends.segments, ends.dw_window) != (plan.segments, plan.dw_window):
            deferred = f", weight gradients deferred by up to {_count(ends.dw_window, 'all-to-all')}"
            at_ends = ", ".join(_segments(ends.segments)) + (deferred if plan.dw_policy is DwPolicy.FILL else "")
            parts.append(f"at the two ends of a step {at_ends}")
    return ", ".join(parts)


def plan_text(plan: Plan) -> str:
    """A plan in words, with its syntax in brackets."""
    return f"{plan_in_words(plan)} ({plan})"


def _segments(segments: tuple[Segment, ...]) -> list[str]:
    if len(segments) == 1:
        return [_segment(segments[0])]
    return [f"layers {one.first_layer} to {one.last_layer or 'the last'}: {_segment(one)}" for one in segments]


def _segment(segment: Segment) -> str:
    text = "whole micro-batches"
    if segment.num_chunks > 1:
        text = f"{_count(segment.num_chunks, 'chunk')} along the {segment.chunk_dim}{_RANGES[segment.range]}"
    if segment.num_chunks > 1 and segment.chunk_multiple > 1:
        text += f" in multiples of {segment.chunk_multiple}"
    if segment.tiles:
        text += f", rows in {_count(segment.tiles, 'tile')}, {_LOCAL_TOKENS[segment.local_tokens]}"
    return text


def _count(number: int, thing: str) -> str:
    word = _NUMBERS[number] if number < len(_NUMBERS) else str(number)
    return f"{word} {thing}{'' if number == 1 else 's'}"

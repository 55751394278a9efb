"""Formats expert-parallel sizes and their predicted steps as text and JSON."""

from collections.abc import Sequence
from typing import Any

from megatron_lancet.lab.what_if.expert_packing import Packing, PackingChoice
from megatron_lancet.planning.profile import Profile
from megatron_lancet.report.tables import right_aligned
from megatron_lancet.schedule.reductions import CommPriority
from megatron_lancet.schedule.units import BYTES_PER_MB

_FIELDS = ("experts_per_rank", "expert_replicas", "num_chunks", "experts_ms", "all_to_all_ms", "covers")
_FORECAST_FIELDS = ("step_ms", "exposed_ms", "gradient_ms")
_HEADER = (
    "EP", "experts a rank", "expert-DP", "chunks", "experts ms", "all-to-all ms", "covered", "exposed ms",
    "gradients ms", "step ms", "memory MB", "",
)  # fmt: skip


def as_text(choice: PackingChoice, profile: Profile) -> str:
    """Returns a table, most ranks first, and the advice."""
    table = [_HEADER, *(_cells(one) for one in choice.packings)]
    return "\n".join([*(line.rstrip() for line in right_aligned(table)), "", *_advice(choice, profile)])


def as_plain(choice: PackingChoice, profile: Profile) -> dict[str, Any]:
    """Returns the sizes and the choice for ``json.dumps``."""
    return {
        "profiled_ep_size": profile.model.ep_size,
        "fastest_ep_size": choice.fastest.layout.ep_size,
        "fewest_experts_ep_size": choice.fewest_experts.layout.ep_size,
        "flags": flags_for(choice.fastest),
        "sizes": [
            {
                "ep_size": one.layout.ep_size,
                "world_size": one.layout.world_size,
                **{name: getattr(one, name) for name in _FIELDS},
                **{name: getattr(one.forecast, name) for name in _FORECAST_FIELDS},
                "state_bytes": one.state_bytes,
                "peak_bytes": one.peak_bytes,
                "fits": one.fits,
                "plan": str(one.forecast.plan),
            }
            for one in choice.packings
        ],
    }


def flags_for(packing: Packing) -> list[str]:
    """Returns the flags that change when a run continues with this size."""
    apart = ["--lancet-experts-apart"] if packing.layout.ep_size == 1 else []
    return ["--expert-model-parallel-size", str(packing.layout.ep_size), *apart]


def _cells(one: Packing) -> tuple[str, ...]:
    forecast = one.forecast
    return (
        *map(str, (one.layout.ep_size, one.experts_per_rank, one.expert_replicas, one.num_chunks)),
        f"{one.experts_ms:.2f}",
        f"{one.all_to_all_ms:.2f}",
        "yes" if one.covers else "no",
        f"{forecast.exposed_ms:.1f}",
        f"{forecast.gradient_ms:.1f}",
        f"{forecast.step_ms:.1f}",
        f"{one.peak_bytes / BYTES_PER_MB:.0f}",
        "" if one.fits else "too large",
    )


def _advice(choice: PackingChoice, profile: Profile) -> Sequence[str]:
    fewest, fastest = choice.fewest_experts, choice.fastest
    lines = []
    if fewest.covers:
        lines.append(
            f"covered with the fewest experts a rank: EP {fewest.layout.ep_size}, {_experts(fewest)}, "
            f"{fewest.forecast.step_ms:.1f} ms a step"
        )
    else:
        lines.append("no size that fits has experts that take as long as a chunk's all-to-all")
    lines.append(f"fastest: EP {fastest.layout.ep_size}, {_experts(fastest)}, {fastest.forecast.step_ms:.1f} ms a step")
    present = next((one for one in choice.packings if one.layout.ep_size == profile.model.ep_size), None)
    if present is fastest:
        lines.append("that is the profiled size: nothing to change")
        return lines
    if present is not None:
        gain = present.forecast.step_ms / fastest.forecast.step_ms
        lines.append(f"the profiled EP {profile.model.ep_size} takes {present.forecast.step_ms:.1f} ms: {gain:.2f}x")
    lines.append(f"to apply: restart from a checkpoint with {' '.join(flags_for(fastest))}")
    if fastest.layout.ep_size == 1:
        lines.append("with EP 1 there is no all-to-all and nothing to overlap: the run has stock Megatron's modules")
        rules = profile.gradients
        if rules is not None and rules.priority is CommPriority.ALL_TO_ALL_FIRST:
            lines.append("drop --lancet-comm-priority then: there are no all-to-alls to give priority to")
    return lines


def _experts(one: Packing) -> str:
    return f"{one.experts_per_rank} expert{'s' if one.experts_per_rank > 1 else ''} a rank"

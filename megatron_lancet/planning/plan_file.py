"""Plan files: a plan, the model that it was made for, its prediction, and the profile that it comes from.

Only ``plan`` is required. A file written by hand may omit ``made_for``: then only the layer numbers of the plan are
checked against a model. Files that are made from a profile always have it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import RecordError, differences, from_plain, parse_object, read_text, take_version
from megatron_lancet.files.records import to_plain
from megatron_lancet.planning.estimate import StepEstimate
from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.schedule.layers import pattern_of
from megatron_lancet.schedule.plan import PLAN_VERSION, Plan, Segment
from megatron_lancet.schedule.ranges import parse_ranges, ranges

PLAN_FILE_VERSION = 1
_MAX_LAYERS = 100_000
"""Upper limit: a number in a damaged file must not fill the memory."""


@dataclass(frozen=True)
class MadeFor:
    """The model and the layout that a plan was made for, as far as it can't be used for others.

    Times also depend on other settings (hidden size, device), but a plan is only slower if these differ, not wrong.

    Attributes:
        num_layers: number of layers, multi-token predictions included.
        moe_layers: numbers of the MoE layers, from 1, as text: ``2, 4-12``.
        num_stages: number of pipeline stages.
        micro_batch_size: samples of a micro-batch.
        seq_length: positions of a sample on a rank.
        num_experts: experts of a MoE layer, on all ranks.
        topk: experts of a token.
        ep_size: number of ranks that share the experts.
        num_mtp_layers: number of layers, the last ones, that are multi-token predictions.
        pattern: one symbol for each layer of a hybrid model, from ``schedule/layers.py``; None for a GPT.
    """

    num_layers: int
    moe_layers: str
    num_stages: int
    micro_batch_size: int
    seq_length: int
    num_experts: int
    topk: int
    ep_size: int
    num_mtp_layers: int = 0
    pattern: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= _MAX_LAYERS:
            raise ValueError(f"num_layers must be 1 to {_MAX_LAYERS}, not {self.num_layers}")
        if any(not 1 <= layer <= self.num_layers for layer in parse_ranges(self.moe_layers)):
            raise ValueError(f"moe_layers {self.moe_layers} are not all among the {self.num_layers} layers")


def made_for(facts: ModelFacts) -> MadeFor:
    """The model and the layout of a profile."""
    moe = [number for number, kind in enumerate(facts.layer_kinds, start=1) if kind.has_experts]
    return MadeFor(
        num_layers=len(facts.layer_kinds),
        moe_layers=ranges(moe),
        pattern=pattern_of(facts.layer_kinds),
        num_stages=len(set(facts.stage_of_layer)),
        micro_batch_size=facts.micro_batch_size,
        seq_length=facts.seq_length,
        num_experts=facts.num_experts,
        topk=facts.topk,
        ep_size=facts.ep_size,
        num_mtp_layers=facts.num_mtp_layers,
    )


@dataclass(frozen=True)
class LayerExposure:
    """Predicted exposed time of one layer in one step, all micro-batches together, on the rank that has most of it."""

    layer: int
    exposed_ms: float


@dataclass(frozen=True, kw_only=True)
class ExpectedStep(StepEstimate):
    """The cost model's prediction of the plan on the profile that it was made from.

    Attributes:
        no_overlap_step_ms: ``step_ms`` without overlap, for comparison.
        layers: layers with exposed time.
    """

    no_overlap_step_ms: float
    layers: tuple[LayerExposure, ...]


@dataclass(frozen=True)
class Source:
    """The profile that a plan comes from.

    Attributes:
        profile: name of the profiled model.
        device: name of the device.
        versions: versions of the relevant packages, by name.
    """

    profile: str
    device: str
    versions: dict[str, str]


@dataclass(frozen=True)
class PlanFile:
    """Content of a plan file.

    Attributes:
        made_for: None if the plan is for all models with its layers.
        prediction: None if there is none.
        source: None if the plan was not made from a profile.
    """

    plan: Plan
    made_for: MadeFor | None = None
    prediction: ExpectedStep | None = None
    source: Source | None = None

    def to_json(self) -> str:
        """The content as indented JSON; parts that are None are omitted."""
        parts = {"plan": {"version": PLAN_VERSION, **to_plain(self.plan)}}
        for name in ("made_for", "prediction", "source"):
            if (part := getattr(self, name)) is not None:
                parts[name] = to_plain(part)
        return json.dumps({"version": PLAN_FILE_VERSION, **parts}, indent=1) + "\n"


def write_plan_file(path: Path, content: PlanFile) -> None:
    """Writes a plan file atomically.

    Raises:
        OSError: the folder does not exist or can't be written.
    """
    atomic_write(path, content.to_json())


def read_plan_file(path: Path) -> PlanFile:
    """Reads a plan file.

    Raises:
        RecordError: the file can't be read, is damaged, of another version, or no plan file.
    """
    value = parse_object(read_text(path), str(path))
    if {"ops", "weight_grads"} <= value.keys():
        raise RecordError(f"{path}: this is a profile; lancet plan make makes a plan of it")
    if "segments" in value:
        raise RecordError(f"{path}: this is a bare plan; a plan file has it as its field 'plan'")
    take_version(value, PLAN_FILE_VERSION, "the plan file", str(path))
    plan = value.get("plan")
    if isinstance(plan, dict):
        take_version(plan, PLAN_VERSION, "the plan", f"{path}.plan")
    content = from_plain(PlanFile, value, str(path))
    if content.made_for is not None and (problem := layers_beyond(content.plan, content.made_for.num_layers)):
        raise RecordError(f"{path}: the plan contradicts its made_for: {problem}")
    return content


def layers_beyond(plan: Plan, num_layers: int) -> str | None:
    """Why a plan's segments do not cover a model of ``num_layers`` layers exactly, or None if they do."""
    problem = _uncovered(plan.segments, num_layers)
    if problem is None and plan.is_paired and (at_ends := _uncovered(plan.at_ends.segments, num_layers)):
        problem = f"at the ends of a step {at_ends}"
    return problem


def _uncovered(segments: Sequence[Segment], num_layers: int) -> str | None:
    last = segments[-1]
    if last.first_layer > num_layers or (last.last_layer or num_layers) > num_layers:
        return f"its last segment is layers {last.first_layer}-{last.last_layer or 'end'} of {num_layers}"
    if last.last_layer is not None and last.last_layer < num_layers:
        return f"it says nothing of layers {last.last_layer + 1}-{num_layers}"
    return None


def misfits(content: PlanFile, model: MadeFor) -> list[str]:
    """One text per field in which a run's model differs from the plan file's; empty if the plan fits.

    For example ``num_layers is 12 in the plan file, 24 in the run``.
    """
    if content.made_for is not None:
        different = [
            f"{name} is {planned} in the plan file, {ours} in the run"
            for name, (planned, ours) in differences(vars(content.made_for), vars(model))
        ]
        if different:
            return different
    problem = layers_beyond(content.plan, model.num_layers)
    return [problem] if problem else []


def check_fits(content: PlanFile, model: MadeFor, where: str) -> None:
    """Refuses a plan that was made for another model.

    Args:
        where: name of the file, for error messages.

    Raises:
        RecordError: names every field that differs.
    """
    different = misfits(content, model)
    if different:
        raise RecordError(
            f"{where} was made for another model or layout: {'; '.join(different)}. Make one for this run with "
            "lancet plan make from a profile of it"
        )

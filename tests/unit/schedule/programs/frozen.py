"""Programs of steps as text, one file for each plan: a changed order shows as changed lines.

A file has these parts of a step, one instruction on each line:

- *forward* of each pipeline stage, as ``schedule/turns.py`` makes it, with cuts and concatenations;
- *backward* of each stage, as the simulator makes it;
- with pairing, the pairs of a step of four micro-batches, as the simulator makes them. Each is a backward with the next
  forward, and the first turn of the forward after that. The simulator plays all virtual stages of a rank as one.

``parity/mocked/test_traced_equals_lowered.py`` and ``parity/paired/test_paired_order.py`` show that the model runs in
this order. Ops outside the layers, such as the head, have no instructions. A file has none of recomputation and
documents either: they happen inside ops.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from benchmarks.synthetic_profile import KINDS, OP_MS, Machine, synthetic_profile
from megatron_lancet.planning.profile import MemoryUse, OpTime, Profile
from megatron_lancet.planning.program_text import parse_program, program_text
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.lowering import (
    BESIDE,
    IN_PASS,
    EndBackward,
    Step,
    layer_at,
)
from megatron_lancet.planning.simulation.pairs import Passes, paired_steps
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Plan, Segment
from megatron_lancet.schedule.turns import (
    Instruction,
    Layer,
    Program,
    mtp_layer,
    program,
    verbs_of,
)

FOLDER = Path(__file__).parent
REPEAT = "python -m tests.unit.schedule.programs --write"
NUM_MICRO_BATCHES = 4
"""Of a paired step: the first pair, the last one, and one between that is like all others."""
NUM_RANKS, NUM_NODES = 4, 2


@dataclass(frozen=True)
class Case:
    """A plan and the model that it is for.

    Attributes:
        layers: letters of the model's layers, see :class:`~benchmarks.synthetic_profile.Machine`.
        stages: pipeline stage of each layer; empty for one stage.
        num_mtp: number of layers, the last ones, that are multi-token predictions.
    """

    plan: Plan
    layers: str = "dm"
    stages: tuple[int, ...] = ()
    has_shared_experts: bool = False
    pads_to_capacity: bool = False
    num_mtp: int = 0

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """Pipeline stage of each layer."""
        return self.stages or (0,) * len(self.layers)

    @property
    def title(self) -> str:
        """The model and the plan, each in a line."""
        kinds = ", ".join(f"{number} {KINDS[letter]}" for number, letter in enumerate(self.layers, start=1))
        extras = [f"on stages {self.stages}"] if self.stages else []
        extras += ["shared experts"] if self.has_shared_experts else []
        extras += ["experts padded to capacity"] if self.pads_to_capacity else []
        extras += [f"multi-token predictions: {self.num_mtp}"] if self.num_mtp else []
        return f"# layers: {'; '.join([kinds, *extras])}\n# plan: {self.plan}\n"

    @property
    def profile(self) -> Profile:
        """A profile whose times are made up: no order depends on times."""
        op_ms = {**OP_MS, **({OpKind.SHARED_EXPERTS: 1.0} if self.has_shared_experts else {})}
        shares = (1 / NUM_RANKS,) * NUM_RANKS
        machine = Machine(
            self.layers, self.stages, op_ms, shares=shares, num_nodes=NUM_NODES, topk=2, dims=(*ChunkDim,)
        )
        profile = synthetic_profile(machine)
        facts = dataclasses.replace(profile.model, pads_to_capacity=self.pads_to_capacity, num_mtp_layers=self.num_mtp)
        phases = (Phase.FORWARD, Phase.INPUT_GRAD)
        times = [
            OpTime(LayerKind.MTP, OpKind.MTP_PROJECTION, phase, ChunkDim.BATCH, 1, 0, 512, 1.0) for phase in phases
        ]
        memory = (*profile.memory, MemoryUse(LayerKind.MTP, ChunkDim.BATCH, 1, 1))
        return dataclasses.replace(profile, model=facts, ops=(*profile.ops, *times), memory=memory)


def layer_of(case: Case, segment: Segment, number: int) -> Layer:
    """The verbs of a chunk in a layer."""
    layer = verbs_of(
        KINDS[case.layers[number - 1]],
        case.has_shared_experts,
        case.pads_to_capacity,
        segment.num_chunks,
        segment.in_tiles(case.plan.dispatch),
    )
    return mtp_layer(layer) if number > len(case.layers) - case.num_mtp else layer


def forward_of(case: Case, segments: Sequence[Segment], stage: int) -> Program:
    """The forward of a pipeline stage, from the table of turns."""
    numbers = [number for number, its in enumerate(case.stage_of_layer, start=1) if its == stage]
    instructions: Program = []
    for segment in segments:
        layers = [(number, layer_of(case, segment, number)) for number in numbers if segment.has_layer(number)]
        instructions += program(layers, segment.num_chunks, segment.range)
    return instructions


def instructions_of(steps: Sequence[Step], phase: Phase) -> Program:
    """The instructions of the simulator's steps; in pairs, steps of a forward have the bit :data:`BESIDE`."""
    return [
        Instruction(
            verb(OpKind(action.kind), action.tile),
            layer_at(place & IN_PASS),
            action.chunk,
            Phase.FORWARD if place & BESIDE else phase,
        )
        for verb, place, action in steps
        if layer_at(place & IN_PASS)
    ]


def pairs_of(steps: Sequence[Step]) -> Iterator[Program]:
    """The instructions of each pair."""
    start = 0
    for index, (verb, _, _) in enumerate(steps):
        if verb is EndBackward:
            yield instructions_of(steps[start:index], Phase.INPUT_GRAD)
            start = index + 1


def programs_of(case: Case) -> dict[str, Program]:
    """The parts of a step, by name."""
    plan, simulator = case.plan, Simulator(CostModel(case.profile))
    found: dict[str, Program] = {}
    for middle, end in zip(simulator.stages(plan.in_middle), simulator.stages(plan.at_ends), strict=True):
        where = f", stage {middle.number}" if case.stages else ""
        passes = {"": (plan.segments, middle)}
        if plan.segments != plan.at_ends.segments:
            passes[" at the ends"] = (plan.at_ends.segments, end)
        for which, (segments, stage) in passes.items():
            found[f"forward{which}{where}"] = forward_of(case, segments, stage.number)
            found[f"backward{which}{where}"] = instructions_of(stage.backward, Phase.INPUT_GRAD)
        if plan.is_paired:
            at_end, in_middle = (Passes(stage.forward, stage.backward) for stage in (end, middle))
            pairs = pairs_of(paired_steps([at_end, *[in_middle] * (NUM_MICRO_BATCHES - 2), at_end]))
            found |= {f"pair {number}{where}": pair for number, pair in enumerate(pairs, start=1)}
    return found


def text_of(case: Case, programs: Mapping[str, Program]) -> str:
    """The text of a file."""
    parts = (f"\n[{name}]\n{program_text(instructions)}" for name, instructions in programs.items())
    return case.title + "".join(parts)


def programs_in(text: str) -> dict[str, Program]:
    """The parts of a step that a file has, by name."""
    _, *parts = text.split("\n[")
    named = (part.partition("]\n") for part in parts)
    return {name: parse_program(lines) for name, _, lines in named}


def difference(name: str, frozen: str, made: str) -> str:
    """The lines that differ, each with its part of the step; empty if there are none."""
    before, now = frozen.splitlines(), made.splitlines()
    return "\n".join(unified_diff(before, now, f"{name}, frozen", f"{name}, now", lineterm=""))

"""Bytes that the ranks of a simulated step keep from forward to backward, without the inputs of deferred dWs.

All activations of a stage's micro-batches in flight, as many as in Megatron's 1F1B after its warm-up. In a pair a
backward frees the last layers while the forward fills the first ones, so pairing adds one layer and what is outside the
layers, and the layers of one virtual stage where there are several stages.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice

from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.plan import ChunkDim, Plan, Segment


class KeptBytes:
    """Computes the bytes that pipeline stages keep under a plan."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._model = costs.model
        self._in_flight = list(_in_flight_by_layer(costs.model))

    def on_fullest_stage(self, segments: Sequence[Segment], dispatch: Dispatch) -> int:
        """Bytes that the fullest pipeline stage keeps from forward to backward, without deferred dWs."""
        return max(self.by_stage(segments, dispatch).values())

    def by_stage(self, segments: Sequence[Segment], dispatch: Dispatch) -> dict[int, int]:
        """Bytes that each stage keeps of all its micro-batches in flight."""
        model, saved = self._model, self._costs.saved_bytes
        stages = sorted(set(model.stage_of_layer))
        kept = {stage: self._kept_beside(stage) * self._most_in_flight(stage) for stage in stages}
        for segment in segments:
            for number in range(segment.first_layer, (segment.last_layer or len(model.layer_kinds)) + 1):
                kind, stage = model.layer_kinds[number - 1], model.stage_of_layer[number - 1]
                size = saved(kind, segment.chunk_dim, segment.num_chunks, dispatch)
                kept[stage] += size * self._in_flight[number - 1]
        return kept

    def in_pairs(self, plan: Plan) -> dict[int, int]:
        """Bytes that each stage keeps of all its micro-batches in flight, if backwards are paired with forwards."""
        model, saved = self._model, self._costs.saved_bytes
        middle, ends = (self.by_stage(one.segments, plan.dispatch) for one in (plan, plan.at_ends))
        kept = {stage: max(middle[stage], ends[stage]) for stage in middle}
        segments = (*plan.segments, *plan.at_ends.segments)
        for stage in kept:
            numbers = [number for number, its in enumerate(model.stage_of_layer, start=1) if its == stage]
            sizes = [
                max(
                    saved(model.layer_kinds[number - 1], segment.chunk_dim, segment.num_chunks, plan.dispatch)
                    for segment in segments
                    if segment.has_layer(number)
                )
                for number in numbers
            ]
            kept[stage] += max(sizes) + self._kept_beside(stage)
            if len(kept) > 1:  # the warm-up of interleaved stages has one forward more
                num_virtual = sum(1 for number in numbers if number - 1 not in numbers)
                kept[stage] += -(-sum(sizes) // num_virtual)
        return kept

    def _most_in_flight(self, stage: int) -> int:
        """Micro-batches of one virtual stage whose activations a stage keeps at a time."""
        return max(num for num, its in zip(self._in_flight, self._model.stage_of_layer, strict=True) if its == stage)

    def room_for_layers(self, stage: int, room_bytes: int) -> int:
        """Bytes that a stage's layers may keep of one micro-batch if a rank has ``room_bytes`` of free memory."""
        numbers = [num for num, its in zip(self._in_flight, self._model.stage_of_layer, strict=True) if its == stage]
        beside = self._kept_beside(stage) * self._most_in_flight(stage)
        return round((room_bytes - beside) * len(numbers) / sum(numbers))  # exact where a stage's layers are alike

    def _kept_beside(self, stage: int) -> int:
        """Bytes that a stage keeps of one micro-batch next to its layers; an upper bound on a stage in the middle."""
        saved, stage_of = self._costs.saved_bytes, self._model.stage_of_layer
        num_projections = sum(stage_of[number - 1] == stage for number in self._model.mtp_layers)
        projection = saved(LayerKind.MTP, ChunkDim.BATCH, 1) if num_projections else 0
        return saved(LayerKind.NONE, ChunkDim.BATCH, 1) + num_projections * projection


def _in_flight_by_layer(model: ModelFacts) -> Iterator[int]:
    """Yields the micro-batches whose activations each layer keeps at the end of the warm-up.

    Virtual stages take turns after as many micro-batches as there are stages, Megatron's default.
    """
    runs = [(stage, len(list(layers))) for stage, layers in groupby(model.stage_of_layer)]
    num_stages, num_virtual = len({stage for stage, _ in runs}), max(Counter(stage for stage, _ in runs).values())
    places: Counter[int] = Counter()
    for stage, num_layers in runs:
        if num_virtual == 1:
            num = min(model.num_micro_batches, num_stages - stage)
        else:
            ahead = 2 * (num_stages - stage - 1) + (num_virtual - 1) * num_stages + 1
            num = list(islice(_forwards(model.num_micro_batches, num_stages, num_virtual), ahead)).count(places[stage])
        places[stage] += 1
        yield from [num] * num_layers


def _forwards(num_micro_batches: int, num_stages: int, num_virtual: int) -> Iterator[int]:
    """Yields the virtual stage of each forward on a rank, in Megatron's order."""
    for start in range(0, num_micro_batches, num_stages):
        for place in range(num_virtual):
            yield from [place] * min(num_stages, num_micro_batches - start)

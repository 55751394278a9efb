"""The plans that a planner may choose from, as data, and why others are not among them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lancet.files import RecordError
from megatron_lancet.planning.profile import ModelFacts
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.plan import ALL_TO_ALLS_PER_LAYER, ChunkDim, DwPolicy, OverlapRange, Plan, Segment


@dataclass(frozen=True)
class Exclusion:
    """What is not considered, in words, and why."""

    what: str
    reason: str


@dataclass(frozen=True)
class Limits:
    """What a plan may be.

    Attributes:
        num_chunks: chunk counts; None for 1 and those that were profiled. 1 is "no overlap between chunks".
        chunk_dims: dimensions to cut along.
        ranges: parts of a segment that may run in chunks.
        dw_policies: what may happen to weight gradients.
        dw_window_layers: windows of deferral, in layers: each is so many all-to-alls of all chunks.
        max_memory_bytes: of activations and deferred dWs on a rank, a hard bound; None for no bound.
        dw_memory_bytes: of deferred dWs on a rank, written into the plan; None for no bound.
        excluded: what the caller left out, and why; repeated in the result.
    """

    num_chunks: tuple[int, ...] | None = None
    chunk_dims: tuple[ChunkDim, ...] = tuple(ChunkDim)
    ranges: tuple[OverlapRange, ...] = tuple(OverlapRange)
    dw_policies: tuple[DwPolicy, ...] = tuple(DwPolicy)
    dw_window_layers: tuple[int, ...] = (1, 2, 4)
    max_memory_bytes: int | None = None
    dw_memory_bytes: int | None = None
    excluded: tuple[Exclusion, ...] = ()


@dataclass(frozen=True, order=True)
class Way:
    """How a segment may run."""

    num_chunks: int
    chunk_dim: ChunkDim = ChunkDim.BATCH
    range: OverlapRange = OverlapRange.STACK

    def segment(self, first_layer: int, last_layer: int | None) -> Segment:
        """Layers that run like that."""
        return Segment(first_layer, last_layer, self.num_chunks, self.chunk_dim, self.range)


@dataclass(frozen=True)
class SearchSpace:
    """Ways, stages and dW options: every plan of the space is a choice of them.

    Attributes:
        ways: of each segment, simplest first.
        runs: neighbouring layers of one pipeline stage, as (first, last) global numbers; no segment crosses them.
        limits: as given.
        excluded: what is not considered, and why.
    """

    ways: tuple[Way, ...]
    runs: tuple[tuple[int, int], ...]
    limits: Limits
    excluded: tuple[Exclusion, ...]

    @staticmethod
    def of(costs: CostModel, limits: Limits) -> "SearchSpace":
        """What ``limits`` and the profile leave.

        Raises:
            RecordError: nothing is left.
        """
        ways: list[Way] = []
        excluded = list(limits.excluded)
        for dim in limits.chunk_dims:
            profiled = costs.profiled_chunk_counts(dim)
            counts = sorted({1, *profiled} if limits.num_chunks is None else set(limits.num_chunks))
            for num_chunks in counts:
                reason = _unusable(costs, dim, num_chunks, profiled)
                if reason:
                    excluded.append(Exclusion(f"chunks={num_chunks} dim={dim}", reason))
                elif num_chunks == 1:
                    ways.append(Way(1))  # one chunk is one chunk, whatever the dimension and the range
                else:
                    ways += [Way(num_chunks, dim, one) for one in limits.ranges]
        if (
            not ways
            or not limits.dw_policies
            or (limits.dw_policies == (DwPolicy.FILL,) and not limits.dw_window_layers)
        ):
            raise RecordError(f"the limits leave no plan: {'; '.join(f'{e.what}: {e.reason}' for e in excluded)}")
        order = tuple(OverlapRange)
        unique = sorted(set(ways), key=lambda way: (way.num_chunks, -order.index(way.range), way.chunk_dim))
        return SearchSpace(tuple(unique), stage_runs(costs.model), limits, tuple(dict.fromkeys(excluded)))

    def num_segmentations(self) -> int:
        """Ways to divide the layers into segments and to choose a way for each."""
        total = 1
        for first, last in self.runs:
            total *= len(self.ways) * (1 + len(self.ways)) ** (last - first)
        return total

    def segmentations(self) -> Iterator[tuple[Segment, ...]]:
        """All of them. Only for small spaces."""
        yield from self._from(0)

    def uniform(self) -> Iterator[tuple[Segment, ...]]:
        """All layers alike: one segment per run of layers of a stage."""
        for way in self.ways:
            yield with_open_end([way.segment(first, last) for first, last in self.runs])

    def dw_options(self, segments: tuple[Segment, ...]) -> Iterator[Plan]:
        """Plans with these segments, simplest first; gaps are not placed yet."""
        limits = self.limits
        if DwPolicy.NONE in limits.dw_policies:
            yield Plan(segments, DwPolicy.NONE)
        if DwPolicy.FILL in limits.dw_policies:
            per_layer = ALL_TO_ALLS_PER_LAYER * max(segment.num_chunks for segment in segments)
            for layers in sorted(set(limits.dw_window_layers)):
                yield Plan(segments, DwPolicy.FILL, per_layer * layers, limits.dw_memory_bytes)

    def _from(self, run: int) -> Iterator[tuple[Segment, ...]]:
        if run == len(self.runs):
            yield ()
            return
        for head in self._of_layers(*self.runs[run]):
            for tail in self._from(run + 1):
                yield with_open_end([*head, *tail]) if run == 0 else (*head, *tail)

    def _of_layers(self, first: int, last: int) -> Iterator[tuple[Segment, ...]]:
        if first > last:
            yield ()
            return
        for end in range(first, last + 1):
            for way in self.ways:
                for tail in self._of_layers(end + 1, last):
                    yield (way.segment(first, end), *tail)


def with_open_end(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The last segment runs to the model's end: a plan of one segment reads the same for every model."""
    last = segments[-1]
    return (*segments[:-1], Segment(last.first_layer, None, last.num_chunks, last.chunk_dim, last.range))


def stage_runs(model: ModelFacts) -> tuple[tuple[int, int], ...]:
    """Neighbouring layers of one pipeline stage, as (first, last) global numbers."""
    starts = [
        number
        for number, stage in enumerate(model.stage_of_layer, start=1)
        if number == 1 or stage != model.stage_of_layer[number - 2]
    ]
    ends = [start - 1 for start in starts[1:]] + [len(model.stage_of_layer)]
    return tuple(zip(starts, ends, strict=True))


def _unusable(costs: CostModel, dim: ChunkDim, num_chunks: int, profiled: tuple[int, ...]) -> str | None:
    """Why micro-batches can't be cut like that, or nobody knows what it would cost."""
    model = costs.model
    if not costs.can_cut(dim, num_chunks):
        return f"a micro-batch has {model.micro_batch_size} samples of {model.seq_length} positions"
    if num_chunks > 1 and num_chunks > max(profiled, default=0):
        return f"chunks along {dim} were profiled up to {max(profiled, default=0)}"
    return None

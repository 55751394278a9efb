"""The plans that the planner may choose from, and why others are excluded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from megatron_lancet import registry
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.dispatch import part_of_bytes
from megatron_lancet.planning.profile import ModelFacts, Profile
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch, LocalTokens
from megatron_lancet.schedule.layout import tiles_blocker
from megatron_lancet.schedule.plan import NO_PAIRING, ChunkDim, DwPolicy, OverlapRange, Plan, Segment

TILES = (1, 2, 4)
"""Numbers of tiles that are tried where a plan with tiles was profiled."""
_WORTHWHILE_PART = 0.99
"""Deduplicated dispatch is chosen if its messages have at most this part of the plain ones' bytes."""


@dataclass(frozen=True)
class Exclusion:
    """A part of the search space that is not considered, and why, both in words.

    Attributes:
        is_evident: whether the reason is plain from the layout, so only ``lancet plan explain`` prints it.
    """

    what: str
    reason: str
    is_evident: bool = False


@dataclass(frozen=True)
class Limits:
    """Restrictions on the plan.

    Attributes:
        num_chunks: allowed chunk counts; None for 1 and those that were profiled. 1 means no overlap between chunks.
        chunk_dims: allowed dimensions to cut along.
        ranges: allowed parts of a segment that run in chunks.
        dw_policies: allowed policies for weight gradients.
        dw_window_layers: windows of deferral in layers; a layer counts as the all-to-alls of all its chunks.
        pairing: whether backwards may be paired with forwards; both, or the only one that is allowed.
        dispatches: what all-to-alls may carry.
        tiles: allowed numbers of tiles, 0 for none; None for none and, with one chunk, :data:`TILES` where a plan with
            tiles was profiled. Chunks have tiles only if they must.
        max_memory_bytes: hard bound on a rank's activations and deferred dWs; None for no bound.
        dw_memory_bytes: bound on a rank's deferred dWs, written into the plan; None for no bound.
        excluded: exclusions that the caller made; repeated in the result.
    """

    num_chunks: tuple[int, ...] | None = None
    chunk_dims: tuple[ChunkDim, ...] = tuple(ChunkDim)
    ranges: tuple[OverlapRange, ...] = tuple(OverlapRange)
    dw_policies: tuple[DwPolicy, ...] = tuple(DwPolicy)
    dw_window_layers: tuple[int, ...] = (1, 2, 4)
    pairing: tuple[bool, ...] = (False, True)
    dispatches: tuple[Dispatch, ...] = field(default_factory=lambda: tuple(Dispatch.known().values()))
    tiles: tuple[int, ...] | None = None
    max_memory_bytes: int | None = None
    dw_memory_bytes: int | None = None
    excluded: tuple[Exclusion, ...] = ()


@dataclass(frozen=True)
class SearchSpace:
    """All plans: layers of each run are divided into segments, each with a choice, and a dW option is added.

    A choice is how a segment runs: a segment of all layers, which :meth:`Segment.with_layers` narrows.

    Attributes:
        choices: options of each segment, simplest first.
        runs: see :func:`stage_runs`; no segment crosses them.
        limits: the restrictions from which the space was made.
        excluded: parts that are not considered, and why.
        joints: numbers of the layers that begin a run on the stage of the layer before.
        pairing: allowed values of whether backwards are paired with forwards.
        tiled: the choices with tiles, which not every dispatch can have.
        is_uniform: whether all layers run alike in all plans.
        dispatch: what all-to-alls carry in all plans of the space; see :func:`chosen_dispatch`.
        rival: another dispatch that may be better, which simulations decide; None if there is none.
        lost: dispatches that are allowed and possible but not as good, and why.
    """

    choices: tuple[Segment, ...]
    runs: tuple[tuple[int, int], ...]
    limits: Limits
    excluded: tuple[Exclusion, ...]
    joints: frozenset[int] = frozenset()
    pairing: tuple[bool, ...] = (False,)
    dispatch: Dispatch = PLAIN
    rival: Dispatch | None = None
    lost: tuple[tuple[Dispatch, str], ...] = ()
    tiled: tuple[Segment, ...] = ()
    is_uniform: bool = False

    @staticmethod
    def of(costs: CostModel, limits: Limits) -> "SearchSpace":
        """The space that ``limits`` and the profile allow.

        Raises:
            RecordError: no plan is allowed.
        """
        choices: list[Segment] = []
        limits = of_wiring(limits) if costs.model.wiring else limits
        excluded = list(limits.excluded)
        for dim in limits.chunk_dims:
            profiled = costs.profiled_chunk_counts(dim)
            counts = sorted({1, *profiled} if limits.num_chunks is None else set(limits.num_chunks))
            for num_chunks in counts:
                reason = _unusable(costs, dim, num_chunks, profiled)
                if reason:
                    excluded.append(Exclusion(f"chunks={num_chunks} dim={dim}", reason))
                elif num_chunks == 1:
                    choices.append(Segment(1, None, 1))  # dimension and range make no difference
                else:
                    multiple = costs.model.chunk_multiple(dim)
                    choices += [Segment(1, None, num_chunks, dim, one, multiple) for one in limits.ranges]
        tiles = _allowed_tiles(costs, limits, excluded)
        must_tile = 0 not in tiles
        choices += [
            replace(choice, tiles=number, local_tokens=one)
            for choice in dict.fromkeys(choices)
            for number in tiles
            for one in LocalTokens
            # One tile with the local rows is the message without tiles.
            if number > (1 if one is LocalTokens.TILED else 0) and (choice.num_chunks == 1 or must_tile)
        ]
        choices = [choice for choice in choices if choice.tiles or not must_tile]
        pairing, allowed = limits.pairing, limits.dispatches
        if must_tile:
            untiled = [one for one in allowed if not one.can_tile]
            excluded += [Exclusion(f"dispatch={one}", "its messages have no tiles") for one in untiled]
            allowed = tuple(one for one in allowed if one.can_tile)
        why = _unpairable(costs.model) if registry.has_pairing() else NO_PAIRING
        if True in pairing and why is not None:
            excluded.append(Exclusion("pairing", why))
            pairing = tuple(one for one in pairing if not one)
        dispatches = chosen_dispatch(costs, allowed)
        excluded += dispatches.excluded
        dispatch = dispatches.chosen
        has_dw_option = DwPolicy.NONE in limits.dw_policies or (limits.dw_policies and limits.dw_window_layers)
        if not choices or not has_dw_option or not pairing or dispatch is None:
            raise RecordError(f"the limits leave no plan: {'; '.join(f'{e.what}: {e.reason}' for e in excluded)}")
        unique = sorted(set(choices), key=_complexity)
        runs, kept = stage_runs(costs.model), tuple(dict.fromkeys(excluded))
        rival, lost = dispatches.rival, dispatches.lost
        tiled = tuple(choice for choice in unique if choice.tiles)
        joints = _joints(costs.model)
        space = SearchSpace(tuple(unique), runs, limits, kept, joints, pairing, dispatch, rival, lost, tiled)
        return replace(space.with_dispatch(dispatch), is_uniform=bool(costs.model.wiring))

    def with_dispatch(self, dispatch: Dispatch) -> "SearchSpace":
        """The space of plans with another dispatch, with tiles where it can have some."""
        choices = [choice for choice in self.choices if not choice.tiles]
        if dispatch.can_tile:
            choices = sorted([*choices, *self.tiled], key=_complexity)
        return replace(self, dispatch=dispatch, choices=tuple(choices))

    def with_tiles_of(self, fast: Sequence[tuple[Segment, ...]]) -> "SearchSpace":
        """The space without choices with tiles that are in none of these segmentations, to which the others belong."""
        kept = {segment.with_layers(1, None) for segments in fast for segment in segments}
        return replace(self, choices=tuple(one for one in self.choices if not one.tiles or one in kept))

    def joined(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """The segments of all runs as a plan's segments, in which layers that run alike read the same for every model.

        The last segment is extended to the model's end, and those that a multi-token prediction separates are joined if
        they are alike: its chunks begin anew in any case.
        """
        whole = [segments[0]]
        for segment in segments[1:]:
            longer = replace(whole[-1], last_layer=segment.last_layer)
            if segment.first_layer in self.joints and longer == replace(segment, first_layer=longer.first_layer):
                whole[-1] = longer
            else:
                whole.append(segment)
        return (*whole[:-1], replace(whole[-1], last_layer=None))

    def num_segmentations(self) -> int:
        """Number of divisions of the layers into segments, times the choices for each segment."""
        if self.is_uniform:
            return len(self.choices)
        total = 1
        for first, last in self.runs:
            total *= len(self.choices) * (1 + len(self.choices)) ** (last - first)
        return total

    def segmentations(self) -> Iterator[tuple[Segment, ...]]:
        """Yields every segmentation; feasible in small spaces only."""
        yield from self.uniform() if self.is_uniform else self._from(0)

    def uniform(self) -> Iterator[tuple[Segment, ...]]:
        """Yields the segmentations in which all layers run alike: one segment per run of layers of a stage."""
        for choice in self.choices:
            yield self.joined([choice.with_layers(first, last) for first, last in self.runs])

    def dw_options(self, segments: tuple[Segment, ...]) -> Iterator[Plan]:
        """Yields the plans with these segments, simplest first, without gaps."""
        limits, dispatch = self.limits, self.dispatch
        if DwPolicy.NONE in limits.dw_policies:
            yield Plan(segments, DwPolicy.NONE, dispatch=dispatch)
        if DwPolicy.FILL in limits.dw_policies:
            per_layer = max(segment.all_to_alls_per_layer(dispatch) for segment in segments)
            for layers in sorted(set(limits.dw_window_layers)):
                yield Plan(segments, DwPolicy.FILL, per_layer * layers, limits.dw_memory_bytes, dispatch=dispatch)

    def _from(self, run: int) -> Iterator[tuple[Segment, ...]]:
        if run == len(self.runs):
            yield ()
            return
        for head in self._cuts(*self.runs[run]):
            for tail in self._from(run + 1):
                yield self.joined([*head, *tail]) if run == 0 else (*head, *tail)

    def _cuts(self, first: int, last: int) -> Iterator[tuple[Segment, ...]]:
        if first > last:
            yield ()
            return
        for end in range(first, last + 1):
            for choice in self.choices:
                for tail in self._cuts(end + 1, last):
                    yield (choice.with_layers(first, end), *tail)


def of_wiring(limits: Limits) -> Limits:
    """The limits where layers run ops between their neighbours', see :func:`~megatron_lancet.schedule.turns.program`.

    No cut may pass between these, so chunks go through whole segments, and the layers of a stage are one segment.
    """
    ranges = tuple(one for one in limits.ranges if one.has_attention)
    why = "its layers run between each other's ops"
    return replace(
        limits,
        ranges=ranges,
        num_chunks=limits.num_chunks if ranges else (1,),
        tiles=(0,),
        excluded=(*limits.excluded, Exclusion("ranges but stack, tiles and several segments", why, is_evident=True)),
    )


@dataclass(frozen=True)
class DispatchChoice:
    """The dispatch of a search; see :class:`SearchSpace`. ``chosen`` is None if no dispatch is allowed and possible."""

    chosen: Dispatch | None
    rival: Dispatch | None
    lost: tuple[tuple[Dispatch, str], ...]
    excluded: tuple[Exclusion, ...]


def chosen_dispatch(costs: CostModel, allowed: Sequence[Dispatch]) -> DispatchChoice:
    """The dispatch of every plan for a profile, and the reasons against others.

    Plans are not simulated with both the plain dispatch and another one that sends fewer bytes in the same messages,
    which would take twice as long, because the bytes decide. Whatever the segments and chunks, deduplicated dispatch
    sends about the same part of the plain one's bytes, and the compute ops take about as long
    (:class:`~megatron_lancet.planning.dispatch.DispatchCosts`). If that part is below 1, each message arrives
    earlier or at the same time and nothing else changes, so a plan is at most as slow with it as without. (Which weight
    gradients fit into the shorter gaps may differ, as in any greedy schedule; no random machine was found where that
    makes a step longer.) If it is not below 1, or hardly, the plain dispatch is as fast and has stock's order of sums.

    With other messages on other wires, as of two hops, bytes do not decide: such a dispatch is the rival of the better
    one of these.
    """
    if not allowed:
        return DispatchChoice(None, None, (), (Exclusion("dispatches", "none is allowed"),))
    blockers = {one: blocker for one in allowed if (blocker := costs.blocker(one)) is not None}
    excluded = tuple(Exclusion(f"dispatch={one}", why.reason, why.is_evident) for one, why in blockers.items())
    possible = [one for one in allowed if one not in blockers]
    lost = tuple(_with_more_bytes(possible, costs.profile)) if PLAIN in possible else ()
    possible = [one for one in possible if one not in dict(lost)]
    chosen, rival = (*possible, None, None)[:2]
    return DispatchChoice(chosen, rival, lost, excluded)


def _with_more_bytes(possible: Sequence[Dispatch], profile: Profile) -> Iterator[tuple[Dispatch, str]]:
    """Yields the dispatches that have more bytes than others in the same messages, and why these win."""
    for one in possible:
        part = None if one.is_plain else part_of_bytes(one, profile)
        if part is not None:
            of_plain = f"{100 * part:.0f} % of the plain ones' bytes"
            if part <= _WORTHWHILE_PART:
                yield PLAIN, f"with {one} messages have {of_plain}"
            else:
                yield one, f"its messages would have {of_plain}"


def stage_runs(model: ModelFacts) -> tuple[tuple[int, int], ...]:
    """Runs of neighbouring layers of one pipeline stage, as (first, last) global numbers.

    A multi-token prediction is a run of its own, because chunks can't pass into it.
    """

    def run_of(number: int) -> tuple[int, int]:
        return model.stage_of_layer[number - 1], number if number in model.mtp_layers else 0

    runs = [list(run) for _, run in groupby(range(1, len(model.layer_kinds) + 1), key=run_of)]
    return tuple((run[0], run[-1]) for run in runs)


def _joints(model: ModelFacts) -> frozenset[int]:
    stage_of, predictions = model.stage_of_layer, model.mtp_layers
    return frozenset(number for number in predictions if number > 1 and stage_of[number - 2] == stage_of[number - 1])


def _complexity(choice: Segment) -> tuple[object, ...]:
    """Sort key, lower is simpler."""
    order = tuple(OverlapRange)
    return choice.num_chunks, choice.tiles, -order.index(choice.range), choice.chunk_dim, choice.local_tokens


def _allowed_tiles(costs: CostModel, limits: Limits, excluded: list[Exclusion]) -> tuple[int, ...]:
    """Numbers of tiles that plans may have; what is excluded is added to a list."""
    allowed = limits.tiles
    if allowed is None:
        return (0, *TILES) if costs.knows_tiles and tiles_blocker(costs.model.layout) is None else (0,)
    blocker = tiles_blocker(costs.model.layout) if any(allowed) else None
    if blocker is not None:
        excluded.append(Exclusion("tiles", blocker.reason))
        allowed = tuple(number for number in allowed if not number)
    return tuple(sorted(set(allowed)))


def _unpairable(model: ModelFacts) -> str | None:
    """Why no backward can run during a forward; None if some can."""
    if model.num_micro_batches == 1:
        return "a step has one micro-batch, so no other runs forward paired with its backward"
    num_stages = len(set(model.stage_of_layer))
    if num_stages > 1 and len(list(groupby(model.stage_of_layer))) == num_stages:
        return "pipeline stages without virtual ones would have to keep up to twice as many micro-batches"
    return None


def _unusable(costs: CostModel, dim: ChunkDim, num_chunks: int, profiled: tuple[int, ...]) -> str | None:
    """Why micro-batches can't be cut like that, or why the cost of doing so is unknown; None if neither holds."""
    model, multiple = costs.model, costs.model.chunk_multiple(dim)
    if not costs.can_cut(dim, num_chunks, multiple):
        wanted = f", and chunks are multiples of {model.token_multiple} tokens" if multiple > 1 else ""
        return f"a micro-batch has {model.micro_batch_size} samples of {model.seq_length} positions{wanted}"
    if num_chunks > 1 and num_chunks > max(profiled, default=0):
        return f"chunks along {dim} were profiled up to {max(profiled, default=0)}"
    return None

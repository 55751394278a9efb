"""The plans that an estimate compares, with the flags that ask for them, or the reason why a run can't have them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lancet.planning.dispatch import with_dispatch
from megatron_lancet.planning.search.search_space import Limits
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange, Plan, fixed_plan, paired

STOCK = "stock"
_BY_FLAGS = "the script's own --lancet flags exclude it"
_RANGES = (OverlapRange.STACK, OverlapRange.GATE, OverlapRange.EXPERTS)
"""Ordered by how much they usually hide, most first."""


@dataclass(frozen=True)
class Candidate:
    """A plan to compare.

    Attributes:
        plan: None if the run can't have it.
        flags: that ask for it; empty for stock.
        why_not: the reason if there is no plan.
    """

    name: str
    plan: Plan | None
    flags: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Allowed:
    """What the plans of a run may be.

    Attributes:
        limits: of its arguments.
        most_chunks: by dimension.
        blockers: why its layout can't have a dispatch, by dispatch.
        stocks_dispatch: carried by the messages of stock, whose flex dispatcher sends a token once to a rank or a node.
    """

    limits: Limits
    most_chunks: Mapping[ChunkDim, int]
    blockers: Mapping[Dispatch, str]
    stocks_dispatch: Dispatch

    @property
    def dispatch(self) -> Dispatch:
        """The dispatch of the first plans: plain, unless the run excludes it."""
        return PLAIN if PLAIN in self.limits.dispatches else self.limits.dispatches[-1]

    def reason(self, start: str) -> str:
        """Why something is excluded."""
        found = (one.reason for one in self.limits.excluded if one.what.startswith(start))
        return next(found, _BY_FLAGS)


def stock(allowed: Allowed) -> Candidate:
    """Stock's order: each message is waited for."""
    return Candidate(STOCK, fixed_plan(1, DwPolicy.NONE, dispatch=allowed.stocks_dispatch))


def basic(allowed: Allowed) -> Iterator[Candidate]:
    """Yields one chunk, pairs, and two and four chunks."""
    dispatch = allowed.dispatch
    one = fixed_plan(1, dispatch=dispatch)
    yield Candidate("one chunk", one, "--lancet-num-chunks 1 --lancet-pairing off")
    if True in allowed.limits.pairing:
        yield Candidate("pairs", paired(one), "--lancet-num-chunks 1 --lancet-pairing on")
    else:
        yield Candidate("pairs", None, why_not=allowed.reason("pairing"))
    for name, count in (("two chunks", 2), ("four chunks", 4)):
        yield _chunks(name, count, allowed, dispatch)


def _chunks(name: str, count: int, allowed: Allowed, dispatch: Dispatch) -> Candidate:
    dim = next((one for one in allowed.limits.chunk_dims if allowed.most_chunks[one] >= count), None)
    if dim is None:
        return Candidate(name, None, why_not=_uncut(count, allowed))
    overlap_range = next((one for one in _RANGES if one in allowed.limits.ranges), None)
    if overlap_range is None:
        return Candidate(name, None, why_not=allowed.reason("ranges"))
    flags = f"--lancet-num-chunks {count} --lancet-chunk-dim {dim} --lancet-range {overlap_range} --lancet-pairing off"
    return Candidate(name, fixed_plan(count, chunk_dim=dim, overlap_range=overlap_range, dispatch=dispatch), flags)


def _uncut(count: int, allowed: Allowed) -> str:
    if ChunkDim.SEQUENCE not in allowed.limits.chunk_dims:
        samples = allowed.most_chunks[ChunkDim.BATCH]
        number = f"a micro-batch has {samples} sample{'s' * (samples > 1)}"
        return f"{number}, and along the sequence: {allowed.reason('sequence')}"
    return f"a micro-batch can't be cut into {count}"


def with_dispatches(best: Candidate, allowed: Allowed) -> Iterator[Candidate]:
    """Yields a plan with each other dispatch that is not plain."""
    assert best.plan is not None
    for dispatch in Dispatch.known().values():
        if dispatch == best.plan.dispatch or dispatch.is_plain:
            continue
        name = f"{best.name}, {dispatch}"
        if dispatch in allowed.limits.dispatches:
            yield Candidate(
                name, with_dispatch(best.plan, dispatch), f"{best.flags} --lancet-dispatch {dispatch}".strip()
            )
        else:
            yield Candidate(name, None, why_not=allowed.blockers.get(dispatch, _BY_FLAGS))

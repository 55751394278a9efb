"""What is predicted and measured: configurations of the overlap, and the cases in which they run. No torch.

In the case ``gradients`` gradients are summed over the ranks during the backward pass, on the same link, and Adam runs.
In :data:`PAIRED_CASES` a step has four micro-batches, whose backwards may be paired with forwards; in
:data:`DISPATCH_CASES` a token has several experts on a rank, to which it may be sent once; in
:data:`NODES_CASES` each of two nodes has two ranks, and messages may take two hops; in :data:`TILED_CASES`
rows go to the other rank in tiles.
"""

from dataclasses import dataclass, replace

from benchmarks.harness.cases import Case, Shape, check_saves_rows, select
from megatron_lancet.errors import UsageError
from megatron_lancet.features.dedup.order import DEDUP
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, LocalTokens, OverlapRange, Plan, fixed_plan, paired

BASELINE = "k1"
"""Stock's order: by what it waits for, the link's rate is set."""
PLANNED = "planned"
"""The configuration that the planner chooses for the case's profile."""


def _fixed_plans() -> dict[str, Plan]:
    none, fill = DwPolicy.NONE, DwPolicy.FILL
    batch, sequence = ChunkDim.BATCH, ChunkDim.SEQUENCE
    return {
        "k1": fixed_plan(1, none),
        "k1-dw": fixed_plan(1, fill),
        "experts-k2": fixed_plan(2, none, batch, OverlapRange.EXPERTS),
        "experts-k4-dw": fixed_plan(4, fill, batch, OverlapRange.EXPERTS),
        "gate-k2-dw": fixed_plan(2, fill, batch, OverlapRange.GATE),
        "gate-k4": fixed_plan(4, none, sequence, OverlapRange.GATE),
        "stack-k2": fixed_plan(2, none),
        "stack-k2-dw": fixed_plan(2, fill),
        "stack-k4-dw": fixed_plan(4, fill),
        "sequence-k2-dw": fixed_plan(2, fill, sequence),
        "sequence-k4": fixed_plan(4, none, sequence),
    }


def _paired_plans() -> dict[str, Plan]:
    whole, chunks = fixed_plan(1), fixed_plan(2)
    return {
        "paired-k1": paired(whole),
        "paired-k1-none": paired(fixed_plan(1, DwPolicy.NONE)),
        "paired-k2": paired(chunks),
        "paired-mix": paired(whole, chunks),
    }


def _plans_of(dispatch: Dispatch) -> dict[str, Plan]:
    return {f"{dispatch}-k{num_chunks}": fixed_plan(num_chunks, dispatch=dispatch) for num_chunks in (1, 2)}


def _tiled_plans() -> dict[str, Plan]:
    return {
        **{
            f"tiles-{tiles}-{local_tokens}": fixed_plan(1, tiles=tiles, local_tokens=local_tokens)
            for tiles in (1, 2, 4)
            for local_tokens in (LocalTokens.HALF, LocalTokens.AFTER)
        },
        "tiles-1-half-none": fixed_plan(1, DwPolicy.NONE, tiles=1),
        "tiles-1-half-k2": fixed_plan(2, tiles=1),
    }


_UNPAIRED_PLANS = _fixed_plans()
FIXED_PLANS = {
    **_UNPAIRED_PLANS,
    **_paired_plans(),
    **_plans_of(DEDUP),
    **_plans_of(TWO_HOP),
    **_tiled_plans(),
}
CONFIGURATIONS = (*FIXED_PLANS, PLANNED)


_SHAPE = Shape(hidden=384, seq_length=256)
_SOME = ("k1", "k1-dw", "experts-k4-dw", "stack-k2", "stack-k4-dw", "sequence-k2-dw", PLANNED)
_PAIRED = ("k1", "stack-k2-dw", *_paired_plans(), PLANNED)
_TOP_4 = ("k1", "stack-k2-dw", *_plans_of(DEDUP), PLANNED)
_NODES = ("k1", "stack-k2-dw", "dedup-k2", *_plans_of(TWO_HOP), PLANNED)
_TILED = ("k1", "k1-dw", "stack-k2-dw", *_tiled_plans(), PLANNED)
_BATCH_ONLY = ("k1", "k1-dw", "stack-k2", "stack-k2-dw", "stack-k4-dw")


def _cases() -> list[Case]:
    skewed = replace(_SHAPE, hot_share=0.4)
    return [
        Case("45", "balanced routing, k1 exposes 45 %", 0.45, (*_UNPAIRED_PLANS, PLANNED), _SHAPE, BASELINE),
        Case("20", "balanced routing, k1 exposes 20 %", 0.20, _SOME, _SHAPE, BASELINE),
        Case("65", "balanced routing, k1 exposes 65 %", 0.65, _SOME, _SHAPE, BASELINE),
        Case("skewed", "one expert of four gets 40 %, k1 exposes 45 %", 0.45, _SOME, skewed, BASELINE),
        Case(
            "gradients",
            "gradients reduced during the backward pass, k1 exposes 45 %",
            0.45,
            _BATCH_ONLY,
            _SHAPE,
            BASELINE,
            optimizer=True,
        ),
    ]


def _paired_cases() -> list[Case]:
    shape = replace(_SHAPE, layers=3, micro_batches=4)
    return [
        Case(
            f"{share}-m4", f"four micro-batches in a step, k1 exposes {share} %", share / 100, _PAIRED, shape, BASELINE
        )
        for share in (45, 20, 65)
    ]


def _top_4_cases() -> list[Case]:
    shape = Shape(layers=3, seq_length=96, experts=8, topk=4)
    return [
        Case(f"{share}-top4", f"top-4 of 8 experts, k1 exposes {share} %", share / 100, _TOP_4, shape, BASELINE)
        for share in (45, 65)
    ]


def _nodes_cases() -> list[Case]:
    """Two ranks share a core, so the model is small. On the link that is not shaped, a second hop is not worth it."""
    shape = Shape(layers=2, hidden=256, seq_length=128, experts=8, topk=4)
    titles = {"65": "k1 exposes 65 %", "unshaped": "on a link that is not shaped"}
    return [
        Case(
            f"{name}-nodes-top4",
            f"two nodes of two ranks, top-4 of 8 experts, {title}",
            0.65 if name == "65" else None,
            _NODES,
            shape,
            BASELINE,
            ranks_per_node=2,
        )
        for name, title in titles.items()
    ]


def _tiled_cases() -> list[Case]:
    title = "balanced routing, rows in tiles, k1 exposes {} %"
    return [Case(f"{share}-tiles", title.format(share), share / 100, _TILED, _SHAPE, BASELINE) for share in (45, 20)]


PAIRED_CASES = tuple(case.name for case in _paired_cases())
TILED_CASES = tuple(case.name for case in _tiled_cases())
DISPATCH_CASES = tuple(case.name for case in _top_4_cases())
NODES_CASES = tuple(case.name for case in _nodes_cases())
CASES = {
    case.name: case for cases in (_cases, _paired_cases, _top_4_cases, _nodes_cases, _tiled_cases) for case in cases()
}
_SAVES_ROWS = {DEDUP: DISPATCH_CASES[0], TWO_HOP: NODES_CASES[0]}


@dataclass(frozen=True)
class Preset:
    """What is run.

    Attributes:
        cases: names.
        repeats: measured steps of each configuration.
        minutes: that it takes on two cores of 2.5 GHz.
    """

    cases: tuple[str, ...]
    repeats: int
    minutes: int

    def __str__(self) -> str:
        return f"cases {' '.join(self.cases)}, which otherwise run only if they are named: about {self.minutes} minutes"


PLAIN = Preset(tuple(case.name for case in _cases()), 12, 40)
PRESETS = {
    "pairing": Preset(PAIRED_CASES, 3, 15),
    "dispatch": Preset(DISPATCH_CASES, 12, 13),
    "nodes": Preset(NODES_CASES, 6, 7),
    "tiles": Preset(TILED_CASES, 12, 14),
}
"""Parts of the benchmark that are not in a plain run, by the options that ask for them."""


def choose(cases: list[str], configurations: list[str] | None, preset: Preset = PLAIN) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`.

    Args:
        cases: names; empty for the cases of ``preset``.
        configurations: names; None for each case's own.

    Raises:
        UsageError: an unknown name, a plan with pairing where a step has one micro-batch, one that deduplicates where
            there is nothing to save, or one with two hops where a node has one rank.
    """
    chosen = select(CASES, cases or preset.cases, CONFIGURATIONS, configurations, noun="configuration")
    for case in chosen:
        dispatches = {name: FIXED_PLANS[name].dispatch for name in case.variants if name != PLANNED}
        check_saves_rows(case, dispatches, _SAVES_ROWS)
        pairs = [name for name in case.variants if name in FIXED_PLANS and FIXED_PLANS[name].is_paired]
        if pairs and case.shape.micro_batches == 1:
            raise UsageError(
                f"configuration {pairs[0]} runs a backward paired with the next forward, and a step of case "
                f"{case.name} has one micro-batch. Pass --cases {PAIRED_CASES[0]}."
            )
    return chosen

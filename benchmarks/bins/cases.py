"""Documents, ways to put them into micro-batches, and the links on which these meet. Neither torch nor Megatron."""

from collections.abc import Callable, Sequence
from itertools import chain

from benchmarks.bins.baselines import first_fit, one_a_row, padded
from benchmarks.harness.cases import Case, Shape, select
from megatron_lancet.planning.documents.bins import Dealing, balanced
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.schedule.plan import fixed_plan

PLAN = fixed_plan(1)
"""Of all variants: no chunks, weight gradients during the all-to-alls of the backward pass."""

ROWS, PADDED, FIRST_FIT, BALANCED = "rows", "padded", "first-fit", "balanced"
BASELINE = FIRST_FIT
"""With what the others' times are compared."""
VARIANTS = (ROWS, PADDED, FIRST_FIT, BALANCED)

FILLED = 0.9
"""Part of the positions of a step's bins that its documents fill in the mean."""
FIELDS = ["step_ms", "exposed_ms", "cpu_ms", "payload_bytes"]
"""Of a step on a rank: from a barrier on, waited for rows and counts, CPU time of the process, bytes of rows that it
sent to the other rank."""
VOCAB = 1024
CORPUS_MEGABYTES = 8.0

_FUNCTIONS = Shape(layers=3, hidden=256, seq_length=1024, micro_batch=1, micro_batches=4, vocab=VOCAB)
_CLASSES = Shape(layers=3, hidden=256, seq_length=2048, micro_batch=1, micro_batches=4, vocab=VOCAB)
"""A full bin has ``seq_length`` tokens, and no document more."""


def _case(documents: str, percent: int, shape: Shape) -> Case:
    title = f"{documents} of the standard library in bins of {shape.seq_length} tokens, rows wait {percent} %"
    return Case(documents, title, percent / 100, VARIANTS, shape, BASELINE)


CASES = {case.name: case for case in (_case("functions", 20, _FUNCTIONS), _case("classes", 20, _CLASSES))}
"""By what becomes a document: a value of ``lancet data corpus --documents``."""

Drawn = Sequence[Sequence[int]]
"""Tokens of the documents of a step, per rank."""


def dealings(shape: Shape, cost: DocumentCost) -> dict[str, Callable[[Drawn], Dealing]]:
    """How the documents of a step are put into micro-batches, by the name of a variant."""
    num_bins, most = shape.micro_batches, shape.seq_length
    return {
        ROWS: one_a_row,
        PADDED: lambda drawn: padded(drawn, num_bins, cost, most),
        FIRST_FIT: lambda drawn: first_fit(drawn, num_bins, most),
        BALANCED: lambda drawn: balanced(drawn, num_bins, cost, most),
    }


def computed_tokens(variant: str, drawn: Drawn, dealing: Dealing, shape: Shape) -> list[list[int]]:
    """Tokens that each rank computes in each micro-batch of a variant, padding included."""
    lengths = list(chain.from_iterable(drawn))

    def of(indices: Sequence[int]) -> int:
        found = [lengths[index] for index in indices]
        if variant in (ROWS, PADDED):
            return len(found) * (shape.seq_length if variant == ROWS else max(found))
        return sum(found)

    return [[of(indices) for indices in rank] for rank in dealing.bins]


def choose(cases: list[str], variants: list[str] | None) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`, each with the variants asked for and the baseline.

    Args:
        cases: names; empty for all.
        variants: names; None for all.

    Raises:
        UsageError: an unknown name.
    """
    return select(CASES, cases, list(VARIANTS), variants, lambda wanted, _: wanted | {BASELINE})

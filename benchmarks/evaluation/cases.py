"""Numbers of replicas and plans of the forward pass, and the links on which they meet. Neither torch nor Megatron."""

from benchmarks.harness.cases import Case, Shape, select
from megatron_lancet.schedule.plan import DwPolicy, fixed_plan

REPLICAS = {"none": 0, "replicas-2": 2, "replicas-4": 4, "replicas-8": 8}
"""Replicas in each layer, by the name of a variant."""
PLANS = {
    "chunks-2": fixed_plan(2, DwPolicy.NONE),
    "tiles-1": fixed_plan(1, DwPolicy.NONE, tiles=1),
    "tiles-2": fixed_plan(1, DwPolicy.NONE, tiles=2),
}
"""Plans of the forward pass, by the name of a variant; the others run Megatron's own layers, which wait."""
VARIANTS = (*REPLICAS, *PLANS)
BASELINE = "none"
"""By what it waits for, the link's rate is set; the others' losses and times are compared with its own."""
FIELDS = ["step_ms", "exposed_ms", "cpu_ms", "payload_bytes", "wire_bytes"]
"""Of a batch on a rank: from a barrier on, waited for rows and counts, CPU time of the process, bytes of rows that it
sent to the other rank, bytes that left its interface."""

SHAPE = Shape(layers=2, hidden=256, experts=16, topk=2, seq_length=256, micro_batch=4)
"""``micro_batch`` windows of a batch on each rank."""


def zipf_shares(num_experts: int) -> list[float]:
    """Share of the rows that each expert is to get in the mean of all batches: in proportion to 1 / n for number n."""
    weights = [1 / number for number in range(1, num_experts + 1)]
    return [weight / sum(weights) for weight in weights]


def _case(percent: int) -> Case:
    title = f"without replicas {percent} % of a batch is waited for"
    return Case(str(percent), title, percent / 100, VARIANTS, SHAPE, BASELINE)


CASES = {case.name: case for case in (_case(45), _case(20))}


def choose(cases: list[str], variants: list[str] | None) -> list[Case]:
    """The cases to run, in the order of :data:`CASES`, each with the variants asked for and the baseline.

    Args:
        cases: names; empty for all.
        variants: names; None for all.

    Raises:
        UsageError: an unknown name.
    """
    return select(CASES, cases, list(VARIANTS), variants, lambda wanted, _: wanted | {BASELINE})

"""What is measured: shapes, variants of a training step, and cases that compare them. Neither torch nor Megatron."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.namespaces import NUM_NODES
from megatron_lancet.errors import UsageError
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.layout import Layout
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its micro-batch.

    Attributes:
        micro_batch: samples of a micro-batch.
        micro_batches: of a step, on each rank.
        hot_share: share of the routed rows that go to the first expert; None: all experts get the same.
        zipf: exponent s of Zipf's law: expert j gets a share in proportion to 1 / (j + 1)^s; None without one.
        te: Transformer Engine layers instead of Megatron's local layers, with stand-ins for its kernels.
        is_wired: MoE layers with a shared expert and dense layers in turn; routed sums are added one layer later.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 4
    experts: int = 4
    topk: int = 1
    seq_length: int = 512
    micro_batch: int = 4
    vocab: int = 1024
    hot_share: float | None = None
    micro_batches: int = 1
    zipf: float | None = None
    te: bool = False
    is_wired: bool = False

    def expert_shares(self) -> list[float]:
        """Share of the routed rows that each expert is to get; sums to 1."""
        if self.zipf is not None:
            weights = [(1 + expert) ** -self.zipf for expert in range(self.experts)]
            return [weight / sum(weights) for weight in weights]
        if self.hot_share is None:
            return [1 / self.experts] * self.experts
        return [self.hot_share] + [(1 - self.hot_share) / (self.experts - 1)] * (self.experts - 1)


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        plan: None for stock modules.
        reference: the variant that it is compared with.
        compute: the variant on the free link whose CPU time bounds its step from below.
        sdpa: torch's fused attention.
        free_link: rows and counts travel on the link that is not shaped.
        blocks_in_backward: a backward all-to-all is waited for where it is issued.
        overlaps_reduction: Megatron's overlap-grad-reduce: gradient buckets are reduced during the backward pass.
        grad_chunk_bytes: most bytes of a micro-op, where all-to-alls go first; None: whole buckets, when complete.
        overlaps_micro_batches: Megatron's overlap-moe-expert-parallel-comm: the all-to-alls of one micro-batch run
            during the compute of the next one. It needs at least two.
        delays_wgrad: adds Megatron's delay-wgrad-compute: weight gradients run apart from input gradients. Needs
            Transformer Engine layers.
        is_placed: experts are on the ranks that ``lancet plan experts`` would choose for the case's load.
    """

    name: str
    plan: Plan | None
    reference: str = "stock"
    compute: str = "stock-free"
    sdpa: bool = False
    free_link: bool = False
    blocks_in_backward: bool = False
    overlaps_reduction: bool = False
    grad_chunk_bytes: int | None = None
    overlaps_micro_batches: bool = False
    delays_wgrad: bool = False
    is_placed: bool = False

    @property
    def schedule(self) -> str:
        """Schedule name for result files; figures of different schedules are not comparable."""
        if self.overlaps_micro_batches:
            return f"Megatron's overlap, two streams emulated{', dW apart' if self.delays_wgrad else ''}"
        return "stock" if self.plan is None else str(self.plan)

    @property
    def pairs_micro_batches(self) -> bool:
        """Whether backwards are paired with the next forward, in our schedule or Megatron's."""
        return self.overlaps_micro_batches or (self.plan is not None and self.plan.is_paired)

    @property
    def dispatch(self) -> Dispatch:
        """What its all-to-alls carry."""
        return PLAIN if self.plan is None else self.plan.dispatch

    @property
    def is_deduplicated(self) -> bool:
        """Whether a token travels once to a rank or once to a node, not once to each of its experts there."""
        return self.dispatch is not PLAIN

    @property
    def is_tiled(self) -> bool:
        """Whether the rows of a chunk go to other ranks in tiles."""
        return self.plan is not None and self.plan.has_tiles

    def is_exact(self, topk: int) -> bool:
        """Whether its loss and gradients must equal stock Megatron's to the bit.

        Args:
            topk: experts of a token.
        """
        sums_alike = self.plan is None or (sums_as_stock(self.plan, topk) and not (self.is_placed and topk > 2))
        return not self.sdpa and sums_alike


def sums_as_stock(plan: Plan, topk: int) -> bool:
    """Whether a plan sums in stock's order.

    Nothing is cut; and where ranks sum a token's outputs before they go back, it has at most two, whose order is none.
    Of tiles each is a GEMM of its own, and one of fewer rows may sum in another order.
    """
    return plan.num_chunks == 1 and not plan.has_tiles and (plan.dispatch is PLAIN or topk <= 2)


@dataclass(frozen=True)
class Case:
    """A model, a link and the variants that take turns on them.

    Attributes:
        exposed_share: share of its forward and backward pass for which the baseline is to wait: it sets the link's
            rate. None for the link that is not shaped.
        variants: their names.
        baseline: name of the variant by which the rate is set.
        optimizer: gradient reduction and optimizer step are in the timed region too.
        ranks_per_node: ranks in each of the two namespaces.
    """

    name: str
    title: str
    exposed_share: float | None
    variants: tuple[str, ...]
    shape: Shape = Shape()
    baseline: str = "stock"
    optimizer: bool = False
    ranks_per_node: int = 1

    @property
    def num_ranks(self) -> int:
        """Of both nodes; all share the experts."""
        return NUM_NODES * self.ranks_per_node

    @property
    def nodes(self) -> Nodes | str:
        """How the ranks lie on nodes, or why messages can't have two hops."""
        return nodes_of_group(self.num_ranks, 1, self.ranks_per_node)

    def why_not(self, dispatch: Dispatch) -> str | None:
        """Why its all-to-alls can't carry that, as the end of a sentence; None if they can."""
        blocker = dispatch.blocker(Layout(self.num_ranks, self.shape.experts, self.shape.topk, nodes=self.nodes))
        return None if blocker is None else blocker.reason


def select(
    cases: Mapping[str, Case],
    names: Collection[str],
    known_variants: Sequence[str],
    variants: Collection[str] | None,
    complete: Callable[[set[str], Case], set[str]] = lambda wanted, _: wanted,
    noun: str = "variant",
) -> list[Case]:
    """The cases to run, in the order of ``cases``, each with its variants in the order of ``known_variants``.

    Args:
        names: of the cases; empty for all.
        variants: names; None for each case's own.
        complete: adds to the wanted variants of a case those that they are compared with.
        noun: what a variant is called in messages.

    Raises:
        UsageError: an unknown name.
    """
    _refuse_unknown("case", names, list(cases))
    _refuse_unknown(noun, variants or [], known_variants)
    selected = []
    for case in cases.values():
        if not names or case.name in names:
            wanted = complete(set(case.variants if variants is None else variants), case)
            selected.append(replace(case, variants=tuple(name for name in known_variants if name in wanted)))
    return selected


def check_saves_rows(case: Case, dispatches: Mapping[str, Dispatch], others: Mapping[Dispatch, str]) -> None:
    """
    Args:
        dispatches: what is to run in it, by name, and how that sends tokens.
        others: by kind of dispatch, the name of a case in which it saves rows.

    Raises:
        UsageError: no token of ``case`` has two experts on a rank, or it can't travel in two hops.
    """
    for name, dispatch in dispatches.items():
        why_not = case.why_not(dispatch)
        if why_not is not None:
            place = f"a {dispatch.receiver}"
            raise UsageError(
                f"{name} sends a token once to {place}, and in case {case.name} {why_not}. "
                f"Pass --cases {others[dispatch]}."
            )


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """``names`` in the order of the given repeat: each comes first in its turn."""
    start = repeat % max(1, len(names))
    return [*names[start:], *names[:start]]


def _refuse_unknown(noun: str, names: Collection[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no {noun} {', '.join(unknown)}. Known: {', '.join(known)}.")

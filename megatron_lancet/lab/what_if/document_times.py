"""Costs of micro-batches of documents, from a profile of micro-batches of uncut samples.

A document's positions attend to it alone. So only the attention time of a micro-batch depends on more than its
tokens: one part of it grows with tokens, the other with pairs of a position and one up to it in the same document.

The ranks of an expert-parallel group wait for each other in every micro-batch. Their micro-batches that run at the same
time are a column, which is simulated by the plan with

- the ops on a rank's own tokens as long as on the rank on which they take longest,
- experts and their weight gradients as long as on the mean number of tokens, since the rows of all ranks are spread
  over all of them,
- messages as large as the messages of the rank with the most tokens.

Left out: rows that experts get unevenly in one micro-batch (the profile's shares hold in each), the time of a kernel
for many short documents next to that for one long one, and memory.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_lancet.errors import UsageError
from megatron_lancet.files.reader import RecordError
from megatron_lancet.planning.documents.cost import DocumentCost, num_pairs
from megatron_lancet.planning.profile import ChunkRouting, MemoryUse, ModelFacts, OpTime, Profile, WeightGradTime
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.curve import Curve
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.schedule.chunk_sizes import chunk_sizes
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, Plan

_BY_RECEIVED_ROWS = (OpKind.EXPERTS, OpKind.OWN_EXPERTS)


@dataclass(frozen=True)
class MicroBatch:
    """The work of one rank in one micro-batch.

    Attributes:
        num_tokens: positions, padding included.
        num_pairs: of a position and one up to it in the same document, padding included.
    """

    num_tokens: int
    num_pairs: int

    @staticmethod
    def packed(lengths: Sequence[int]) -> "MicroBatch":
        """Documents one after the other."""
        return MicroBatch(sum(lengths), sum(map(num_pairs, lengths)))

    @staticmethod
    def padded(num_rows: int, length: int) -> "MicroBatch":
        """Documents of one row each, padded to ``length``."""
        return MicroBatch(num_rows * length, num_rows * num_pairs(length))


@dataclass(frozen=True)
class PairShares:
    """Share of attention's time that grows with pairs, in the profiled micro-batch, by phase."""

    forward: float
    backward: float

    def of(self, phase: Phase) -> float:
        """The share in one phase."""
        return self.forward if phase is Phase.FORWARD else self.backward


def profiled(facts: ModelFacts) -> MicroBatch:
    """The micro-batch of a profile, whose samples are documents of their own."""
    return MicroBatch.padded(facts.micro_batch_size, facts.seq_length)


def measured_pair_shares(profile: Profile) -> PairShares:
    """The shares by which attention's times in sequences of several lengths fit best.

    The first chunk of a sequence sees its own positions only, as a document does. Later chunks see all earlier ones,
    for which a kernel may do more work than their pairs are.

    Raises:
        UsageError: the profile has no times of such chunks.
    """
    if not any(map(_is_first_of_several, profile.ops)):
        raise UsageError(
            "the profile has no times of attention in chunks along the sequence, which give the cost of long "
            "documents. Profile the model with such chunks, or pass --attention-cost"
        )
    return PairShares(_fitted_share(profile, Phase.FORWARD), _fitted_share(profile, Phase.INPUT_GRAD))


def _is_first_of_several(op: OpTime) -> bool:
    is_cut = op.chunk_dim is ChunkDim.SEQUENCE and op.num_chunks > 1
    return op.kind == OpKind.ATTENTION and is_cut and op.chunk == 0


def _fitted_share(profile: Profile, phase: Phase) -> float:
    """Minimal squares of ms = by_token * tokens + by_pair * pairs, both relative to the full micro-batch."""
    facts = profile.model
    multiple = facts.chunk_multiple(ChunkDim.SEQUENCE)
    tokens_squared = both = pairs_squared = tokens_ms = pairs_ms = 0.0
    for op in profile.ops:
        is_whole = op.kind == OpKind.ATTENTION and op.num_chunks == 1
        if op.phase is not phase or not (is_whole or _is_first_of_several(op)):
            continue
        length = chunk_sizes(facts.seq_length, op.num_chunks, multiple)[0]
        tokens, pairs = length / facts.seq_length, num_pairs(length) / num_pairs(facts.seq_length)
        tokens_squared, both, pairs_squared = (
            tokens_squared + tokens**2,
            both + tokens * pairs,
            pairs_squared + pairs**2,
        )
        tokens_ms, pairs_ms = tokens_ms + tokens * op.ms, pairs_ms + pairs * op.ms
    by_token = pairs_squared * tokens_ms - both * pairs_ms
    by_pair = tokens_squared * pairs_ms - both * tokens_ms
    total = by_token + by_pair
    return min(max(by_pair / total, 0.0), 1.0) if total > 0 else 0.0


def given_pair_shares(profile: Profile, cost: DocumentCost) -> PairShares:
    """The shares that give documents a known cost.

    Raises:
        UsageError: attention would take longer than the profile says that it does.
    """
    whole = profiled(profile.model)
    work = _work_ms(profile)
    pairs = cost.tokens_per_pair * whole.num_pairs
    own_ms = _own_ms(profile, work)
    pair_ms = own_ms * pairs / (whole.num_tokens + pairs)
    if pair_ms > work.attention_ms:
        most = work.attention_ms / (own_ms - work.attention_ms) * whole.num_tokens / whole.num_pairs
        raise UsageError(
            f"--attention-cost {cost.tokens_per_pair:g} would make attention longer than the "
            f"{work.attention_ms:.1f} of {own_ms:.1f} ms that it takes in the profile; expected at most "
            f"{most:.2g}"
        )
    share = pair_ms / work.attention_ms if work.attention_ms else 0.0
    return PairShares(share, share)


def document_cost(profile: Profile, shares: PairShares) -> DocumentCost:
    """The cost of documents on the machine of a profile, as ranks deal them: of their own work only.

    With expert parallelism the rows of a document are spread over all ranks of the group, so of what its tokens
    cost the routed experts are not its rank's.
    """
    whole, work = profiled(profile.model), _work_ms(profile)
    pair_ms = shares.forward * work.attention_forward_ms + shares.backward * work.attention_backward_ms
    return DocumentCost((pair_ms / whole.num_pairs) / ((_own_ms(profile, work) - pair_ms) / whole.num_tokens))


def _own_ms(profile: Profile, work: "_Work") -> float:
    """Compute on a rank's own tokens in a profiled micro-batch."""
    return work.total_ms - (work.by_received_rows_ms if profile.model.ep_size > 1 else 0.0)


@dataclass(frozen=True)
class _Work:
    """Compute of a profiled micro-batch on one rank, without waits."""

    total_ms: float
    attention_forward_ms: float
    attention_backward_ms: float
    by_received_rows_ms: float

    @property
    def attention_ms(self) -> float:
        return self.attention_forward_ms + self.attention_backward_ms


def _work_ms(profile: Profile) -> _Work:
    """Sums over all layers: what one of a pipeline's stages computes is a part of it."""
    count = _layers_by_kind(profile.model)
    whole = [op for op in profile.ops if op.num_chunks == 1 and op.dispatch.is_plain and not op.tiles]
    grads = [grad for grad in profile.weight_grads if grad.num_chunks == 1]
    by_rows = [op.ms * count[op.layer_kind] for op in whole if op.kind in _BY_RECEIVED_ROWS]
    by_rows += [grad.ms * count[grad.layer_kind] for grad in grads if grad.after in _BY_RECEIVED_ROWS]
    attention = {
        phase: sum(op.ms * count[op.layer_kind] for op in whole if (op.kind, op.phase) == (OpKind.ATTENTION, phase))
        for phase in Phase
    }
    return _Work(
        sum(op.ms * count[op.layer_kind] for op in whole) + sum(grad.ms * count[grad.layer_kind] for grad in grads),
        attention[Phase.FORWARD],
        attention[Phase.INPUT_GRAD],
        sum(by_rows),
    )


def _layers_by_kind(facts: ModelFacts) -> dict[LayerKind, int]:
    counts = {kind: facts.layer_kinds.count(kind) for kind in LayerKind}
    return counts | {LayerKind.NONE: 1, LayerKind.MTP: facts.num_mtp_layers}


def as_one_sample(profile: Profile) -> Profile:
    """The profile of the same tokens in one sample, as bins are: they are cut along the sequence only.

    Cut at document ends near equal time, chunks take equally long, so attention's times are means over them.
    """
    facts = profile.model
    means: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for op in profile.ops:
        means[_place_in_layer(op)].append(op.ms)

    def kept[Of: (OpTime, ChunkRouting, MemoryUse)](many: Sequence[Of]) -> tuple[Of, ...]:
        return tuple(one for one in many if one.num_chunks == 1 or one.chunk_dim is ChunkDim.SEQUENCE)

    return dataclasses.replace(
        profile,
        model=dataclasses.replace(facts, micro_batch_size=1, seq_length=facts.micro_batch_size * facts.seq_length),
        ops=tuple(
            dataclasses.replace(op, ms=fmean(means[_place_in_layer(op)])) if op.kind == OpKind.ATTENTION else op
            for op in kept(profile.ops)
        ),
        routing=kept(profile.routing),
        memory=kept(profile.memory),
    )


def _place_in_layer(op: OpTime) -> tuple[object, ...]:
    return op.layer_kind, op.kind, op.phase, op.chunk_dim, op.num_chunks, op.dispatch, op.tiles


class ColumnTimes:
    """Times of micro-batches of documents by one plan; simulations are cached."""

    def __init__(self, profile: Profile, plan: Plan, shares: PairShares, base: MicroBatch) -> None:
        """
        Args:
            profile: of :func:`as_one_sample`, in the layout that is asked for.
            shares: from the profile of whole samples.
            base: the micro-batch of that profile.

        Raises:
            RecordError: the plan does not fit, or the profile has no times for it.
            UsageError: the plan pairs micro-batches.
        """
        if plan.is_paired:
            raise UsageError(
                "a plan with pairing can't be predicted for documents: each backward is paired with another "
                "micro-batch. Pass --pairing off, or another plan"
            )
        self._profile, self._plan, self._shares, self._base = profile, plan, shares, base
        self._multiple = profile.model.token_multiple
        self._num_stages = len(set(profile.model.stage_of_layer))
        self._curves: dict[tuple[object, ...], Curve] = {}
        for key, many in _grouped(profile).items():
            self._curves[key] = Curve((one.rows, one.ms) for one in many)
        self._work = _work_ms(profile)
        self._seen: dict[tuple[int, int, int, int], float] = {}
        self._calibration = 1.0
        self._calibration = self._expected_over_simulated()

    def own_ms(self, batch: MicroBatch) -> float:
        """Compute on the tokens of a rank's own micro-batch, over all layers, without experts and without waits."""
        work, shares = self._work, self._shares
        tokens, pairs = self._relative(batch)
        pair_ms = shares.forward * work.attention_forward_ms + shares.backward * work.attention_backward_ms
        return (work.total_ms - work.by_received_rows_ms - pair_ms) * tokens + pair_ms * pairs

    def compute_ms(self, column: Sequence[MicroBatch]) -> list[float]:
        """Compute of each rank, without waits: on its own tokens, and on its part of the rows of all."""
        experts_ms = self._work.by_received_rows_ms * fmean(self._relative(batch)[0] for batch in column)
        return [self.own_ms(batch) + experts_ms for batch in column]

    def column_ms(self, column: Sequence[MicroBatch]) -> float:
        """Time of the micro-batches that the ranks of an expert-parallel group run at the same time.

        With a pipeline it is the time of its slowest stage.
        """
        slowest = max(column, key=self.own_ms)
        most, mean = max(batch.num_tokens for batch in column), fmean(batch.num_tokens for batch in column)
        key = (most, slowest.num_tokens, slowest.num_pairs, round(mean))
        if key not in self._seen:
            self._seen[key] = self._simulated(slowest, most, mean)
        return self._calibration * self._seen[key]

    def _relative(self, batch: MicroBatch) -> tuple[float, float]:
        return batch.num_tokens / self._base.num_tokens, batch.num_pairs / self._base.num_pairs

    def _simulated(self, slowest: MicroBatch, most_tokens: int, mean_tokens: float) -> float:
        profile, multiple = self._profile, self._multiple
        num_tokens = max(most_tokens, self._plan.num_chunks * multiple)
        num_tokens = -(-num_tokens // multiple) * multiple
        tokens, pairs = self._relative(slowest)
        of_message = num_tokens / self._base.num_tokens

        def linear_ms(one: OpTime | WeightGradTime) -> float:
            curve = self._curves[_family(one)]
            measured_ms = curve.at(one.rows)
            return one.ms * (curve.at(one.rows * tokens) / measured_ms if measured_ms > 0 else tokens)

        def scaled_op(op: OpTime) -> OpTime:
            if op.kind in _BY_RECEIVED_ROWS:
                return dataclasses.replace(op, rows=round(op.rows * num_tokens / mean_tokens))
            ms = linear_ms(op)
            if op.kind == OpKind.ATTENTION:
                share = self._shares.of(op.phase)
                ms = op.ms * ((1 - share) * tokens + share * pairs)
            return dataclasses.replace(op, rows=round(op.rows * of_message), ms=ms)

        def scaled_grad(grad: WeightGradTime) -> WeightGradTime:
            if grad.after in _BY_RECEIVED_ROWS:
                return dataclasses.replace(grad, rows=round(grad.rows * num_tokens / mean_tokens))
            return dataclasses.replace(grad, rows=round(grad.rows * of_message), ms=linear_ms(grad))

        column = dataclasses.replace(
            profile,
            model=dataclasses.replace(profile.model, seq_length=num_tokens, num_micro_batches=1),
            ops=tuple(map(scaled_op, profile.ops)),
            weight_grads=tuple(map(scaled_grad, profile.weight_grads)),
            rest_ms=0.0,
            gradients=None,
            routing=(),
            paces=(),
        )
        return Simulator(CostModel(column)).predict(self._plan).slot_ms

    def _expected_over_simulated(self) -> float:
        """Expected time of the profiled step over a step of equal columns: ranks drift apart, and rows are uneven."""
        facts, rest_ms = self._profile.model, self._profile.rest_ms
        simulator = Simulator(CostModel(self._profile))
        prediction = simulator.predict(self._plan)
        expected_ms = simulator.expected_step(self._plan).step_ms - rest_ms - prediction.gradient_ms
        simulated_ms = self.column_ms([self._base]) * (facts.num_micro_batches + self._num_stages - 1)
        if not expected_ms > 0 or not simulated_ms > 0:
            raise RecordError("the profile predicts a step without compute")
        return expected_ms / simulated_ms


def _family(one: OpTime | WeightGradTime) -> tuple[object, ...]:
    """The common key of measurements with different numbers of chunks."""
    if isinstance(one, WeightGradTime):
        return one.layer_kind, one.name
    return one.layer_kind, one.kind, one.phase, one.dispatch, one.tiles


def _grouped(profile: Profile) -> dict[tuple[object, ...], list[OpTime | WeightGradTime]]:
    groups: dict[tuple[object, ...], list[OpTime | WeightGradTime]] = defaultdict(list)
    measured: list[OpTime | WeightGradTime] = [*profile.ops, *profile.weight_grads]
    for one in measured:
        groups[_family(one)].append(one)
    return groups

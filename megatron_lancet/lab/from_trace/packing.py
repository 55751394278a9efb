"""Work of our ops in addition to stock's: a dispatch packs rows and their probabilities into one message, for one more
copy.

Stock sends probabilities in an all-to-all of their own. The copy is in the op that makes the rows: the permutation in
the forward, the experts in the backward. It takes about as long as the permutation, which copies the same rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_lancet.lab.from_trace.chunks import OpShares
from megatron_lancet.planning.measured.op_times import OpKey
from megatron_lancet.planning.profile import OpTime
from megatron_lancet.schedule.ops import OpKind, Phase

_PACKS = frozenset({(OpKind.PREPROCESS.value, Phase.FORWARD), (OpKind.EXPERTS.value, Phase.INPUT_GRAD)})


def with_packing(
    ops: Sequence[OpTime], shares: Mapping[OpKey, OpShares]
) -> tuple[tuple[OpTime, ...], dict[OpKey, OpShares]]:
    """Returns the times of unchunked micro-batches with the copy that packs rows, and the shares of these times."""
    copy_ms = {
        op.layer_kind: op.ms * shares[key_of(op)].scaled
        for op in ops
        if (op.kind, op.phase) == (OpKind.PREPROCESS.value, Phase.FORWARD)
    }
    found, new_shares = [], dict(shares)
    for op in ops:
        packing_ms = copy_ms.get(op.layer_kind, 0.0) if (op.kind, op.phase) in _PACKS else 0.0
        if packing_ms > 0:
            of = shares[key_of(op)]
            ms = op.ms + packing_ms
            new_shares[key_of(op)] = OpShares((of.scaled * op.ms + packing_ms) / ms, of.core * op.ms / ms)
            op = replace(op, ms=round(ms, 5))
        found.append(op)
    return tuple(found), new_shares


def key_of(op: OpTime) -> OpKey:
    """The key of an op's samples."""
    return OpKey(op.layer_kind, op.kind, op.phase, op.chunk_dim, op.num_chunks, op.chunk, op.dispatch)

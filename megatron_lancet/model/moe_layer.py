"""One chunk's way through a Mixture-of-Experts layer, top to bottom; stops wherever its rows are on the wire."""

from collections.abc import Generator

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_lancet.model.chunking import Chunk
from megatron_lancet.model.dispatcher.all_to_all import AllToAllDispatcher
from megatron_lancet.runtime.all_to_all import AllToAll, Comm
from megatron_lancet.schedule.ops import Op, Phase

Steps = Generator[Op, None, torch.Tensor]
"""Yields each op that is in flight, so that others can run; returns hidden states."""


def moe_steps(moe: MoELayer, dispatcher: AllToAllDispatcher, hidden: torch.Tensor, chunk: Chunk, comm: Comm) -> Steps:
    """Route, dispatch, experts, combine.

    Args:
        hidden: [S, b, H], normed input of the layer.

    Returns:
        [S, b, H].
    """

    def op(kind: str) -> Op:
        return Op(moe.layer_number, chunk.index, Phase.FORWARD, kind)

    probs, routing_map = moe.router(hidden, chunk=chunk)
    counts = dispatcher.start_counts(op("counts"), routing_map)
    rows = dispatcher.permute(hidden, probs, routing_map, moe.config.moe_router_topk)
    routes = dispatcher.routes(counts)

    dispatch = AllToAll(comm, op("dispatch"), routes.splits)
    tokens, token_probs = dispatch.issue(rows.tokens, rows.probs)
    shared_output = moe.shared_experts_compute(hidden)
    yield dispatch.op
    tokens, token_probs = dispatch.wait(tokens, token_probs)

    tokens, token_probs = dispatcher.sort_by_expert(tokens, token_probs, routes)
    output, bias = moe.experts(tokens, routes.rows_per_expert, token_probs)
    assert bias is None, "experts return their bias added to the output"
    output = dispatcher.sort_by_peer(output, routes)

    combine = AllToAll(comm, op("combine"), routes.splits.reversed())
    (output,) = combine.issue(output)
    yield combine.op
    (output,) = combine.wait(output)

    output = dispatcher.unpermute(output, rows)
    return output if shared_output is None else output + shared_output

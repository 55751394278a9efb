"""What a profile of plain steps says about two hops, next to what a step in two hops sends: four ranks as two nodes."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.planning.profile import HopRows, ModelFacts
from megatron_lancet.profiler.facts import ProfiledModel, model_facts
from megatron_lancet.profiler.routing import RankRouting, chunk_routing, rows_of_step
from megatron_lancet.runtime.collectives import from_all_ranks
from megatron_lancet.runtime.trace import StepTrace, Trace
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.plan import Plan, fixed_plan
from megatron_lancet.schedule.timeline import Lane
from tests.parity.gradients.gradients_worker import (
    MICRO_BATCH,
    NUM_MICRO_BATCHES,
    SEQ_LENGTH,
    build,
    close,
    logged_losses,
    overlapping_model,
    step,
    wrap_with_ddp,
)

RANKS_PER_NODE = 2


def profiled_and_sent(config: dict[str, Any], num_chunks: int) -> dict[str, dict[str, int]]:
    """Bytes of this rank's messages in two hops, by op.

    Returns:
        ``profiled`` from the routing of a step with plain dispatch, empty unless this rank's group is the one that
        profiles keep; ``sent`` by a step in two hops.
    """
    from megatron.core import parallel_state

    expert_tp_size = config.get("expert_tensor_parallel_size", 1)
    nodes = nodes_of_group(config["expert_model_parallel_size"], expert_tp_size, RANKS_PER_NODE)
    assert isinstance(nodes, Nodes)
    model, transformer, precision = build(config)
    setup, stats = overlapping_model(model, fixed_plan(1), switchable=True, nodes=nodes)
    ddp = wrap_with_ddp(model, transformer, precision, setup.delays_weight_grads)

    def traced(plan: Plan) -> StepTrace:
        setup.switch(plan)
        trace = Trace(torch.device("cpu"), dist.get_rank())
        model.decoder.comm.record_to(trace)
        trace.begin_step()
        step(ddp)
        model.decoder.comm.record_to(None)
        return trace.end_step()

    facts = model_facts(ProfiledModel((model,), torch.device("cpu"), MICRO_BATCH, SEQ_LENGTH, NUM_MICRO_BATCHES))
    assert (facts.nodes, facts.expert_tp_size) == (nodes, expert_tp_size)
    group = min(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))
    place = parallel_state.get_expert_model_parallel_rank()
    plain = fixed_plan(num_chunks)
    own = RankRouting(group, place, {}, rows_of_step(traced(plain), plain, facts), 0)
    profiled: dict[str, int] = {}
    for chunk in chunk_routing(from_all_ranks(own), facts.ep_size, facts.nodes):
        assert chunk.hops is not None
        if group == 0:
            profiled |= _bytes_of(chunk.hops, place, facts, f"L{chunk.layer}.c{chunk.chunk}")
    sent: dict[str, int] = {}
    for span in traced(fixed_plan(num_chunks, dispatch=TWO_HOP)).timeline.spans:
        if span.lane is Lane.COMM and not span.name.endswith("counts"):
            sent.setdefault(str(Op.parse(span.name)), span.num_bytes)  # of the first micro-batch
    close(stats)
    logged_losses()
    return {"profiled": profiled, "sent": sent}


def _bytes_of(hops: HopRows, place: int, facts: ModelFacts, chunk: str) -> dict[str, int]:
    forward = {
        "node_dispatch": hops.node_sent[place] * facts.row_bytes_to(facts.nodes.num_nodes),
        "local_dispatch": hops.local_sent[place] * facts.row_bytes_to(facts.ep_size),
        "local_combine": hops.local_received[place] * facts.combine_row_bytes,
        "node_combine": hops.node_received[place] * facts.combine_row_bytes,
    }
    backward = {
        "node_dispatch": hops.node_received[place] * facts.row_bytes_to(facts.nodes.num_nodes),
        "local_dispatch": hops.local_received[place] * facts.row_bytes_to(facts.ep_size),
        "local_combine": hops.local_sent[place] * facts.combine_row_bytes,
        "node_combine": hops.node_sent[place] * facts.combine_row_bytes,
    }
    return {
        f"{chunk}.{phase}.{kind}": num_bytes
        for phase, messages in (("F", forward), ("I", backward))
        for kind, num_bytes in messages.items()
    }

"""Evaluation with hidden all-to-alls: a batch goes through a loaded model's layers in chunks, or its rows in tiles.

The forward pass equals training's (``model/``), without gradients: while rows are in flight, attention and experts
of other chunks run, or experts on rows that are here (for prefill EPS-MoE's idea, section 3).
"""

import argparse
from datetime import timedelta

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed import distributed_c10d, get_process_group_ranks, get_rank

from megatron_lancet.errors import UsageError
from megatron_lancet.inference.load import LoadedModel, number_of_ranks
from megatron_lancet.model.gpt import overlap
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.runtime.peers import Peers
from megatron_lancet.runtime.transport.select import make_transport
from megatron_lancet.schedule.plan import DwPolicy, Plan, fixed_plan
from megatron_lancet.training.arguments import default_arguments
from megatron_lancet.training.plan.limits import routing_over_full_micro_batch

CHUNKS_FLAG, TILES_FLAG = "--chunks", "--tiles"


def evaluation_plan(num_chunks: int, num_tiles: int, batch_size: int, trained: argparse.Namespace) -> Plan:
    """The plan of a forward pass without gradients.

    Args:
        num_chunks: chunks of a batch, along its windows.
        num_tiles: parts in which rows go to other ranks; 0 for one message.
        batch_size: windows of a batch on a rank.
        trained: Megatron's arguments of the run that wrote the checkpoint.

    Raises:
        UsageError: there are fewer windows than chunks, or only one rank, or a token's route depends on other tokens,
            or layers run by Megatron's own forward pass only.
    """
    flags = [f"{CHUNKS_FLAG} {num_chunks}"] * (num_chunks > 1) + [f"{TILES_FLAG} {num_tiles}"] * (num_tiles > 0)
    if getattr(trained, "lancet_shortcut_moe", False):
        raise UsageError(
            f"{' and '.join(flags)} can't be used: the checkpoint was trained with --lancet-shortcut-moe, whose layers "
            "are evaluated by Megatron's own forward pass. Drop it."
        )
    args = argparse.Namespace(**{**vars(default_arguments()), **vars(trained)})
    for flag in routing_over_full_micro_batch(args) if num_chunks > 1 else ():
        raise UsageError(
            f"{CHUNKS_FLAG} {num_chunks} does not work with {flag}, with which the checkpoint was trained: routes "
            f"depend on all tokens of a batch. Drop {CHUNKS_FLAG}; {TILES_FLAG} works."
        )
    if num_chunks > batch_size:
        raise UsageError(
            f"{CHUNKS_FLAG} {num_chunks} cuts a batch of {batch_size} windows, which has fewer. Pass a larger "
            "--batch-size or fewer chunks."
        )
    if number_of_ranks() == 1:
        raise UsageError(
            f"{' and '.join(flags)} {'are' if len(flags) > 1 else 'is'} not possible: one rank holds all experts, so "
            "there are no messages to hide. Start several ranks with torchrun, or drop it."
        )
    return fixed_plan(num_chunks, DwPolicy.NONE, tiles=num_tiles)


def overlap_evaluation(model: LoadedModel, plan: Plan, timeout: timedelta) -> CommStats:
    """Makes a model run its batches by a plan. Collective: all ranks with the same plan.

    Args:
        timeout: maximum wait for other ranks' messages.

    Returns:
        Counters of its messages.

    Raises:
        UsageError: the overlapping layers don't support a part of the model, or the model can't run the plan.
    """
    (gpt,) = (module for module in model.module.modules() if isinstance(module, GPTModel))  # within Float16Module
    stats = CommStats(model.device)
    group = parallel_state.get_expert_model_parallel_group()
    counts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
    transport = make_transport(group, counts_group, model.device, stats, timeout)
    peers = Peers(get_process_group_ranks(group), get_rank(), distributed_c10d._get_default_store(), timeout)
    comm = Comm(transport, None, stats, own_rank=group.rank(), peers=peers)
    overlap(gpt, plan, comm, overlaps_evaluation=True)
    gpt.register_forward_hook(lambda *_: stats.read_reached())  # else all batches' events live to the end
    return stats

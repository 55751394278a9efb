"""From a launch to the run that is estimated: the dry run's findings, and what the plans of such a run may be."""

import argparse
from dataclasses import replace

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.plan import saves_scores
from megatron_lancet.lab.dry_run.run import examine
from megatron_lancet.lab.estimate.candidates import Allowed
from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.layer_parts import num_identity_experts
from megatron_lancet.lab.estimate.model_profile import Run
from megatron_lancet.lab.launch.launch import Launch, as_dry_run
from megatron_lancet.lab.what_if.forecast import Routing
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.training.layer_pattern import hybrid_pattern, other_layers
from megatron_lancet.training.plan.dispatch import allowed_dispatches, dispatch_blocker
from megatron_lancet.training.plan.limits import chunked_dim, planning_limits
from megatron_lancet.training.plan.support import micro_batch_shape


def run_of(launch: Launch, cluster: ClusterChoice, routing: Routing) -> Run:
    """Validates a launch as a dry run on the cluster does.

    Raises:
        UsageError: the run would refuse its arguments or the number of ranks, or it has nothing to estimate.
    """
    size = ["--lancet-world-size", str(cluster.num_ranks), "--lancet-ranks-per-node", str(cluster.ranks_per_node)]
    with as_dry_run(replace(launch, words=[*launch.words, *size])):  # behind the script's own, which they replace
        findings = examine()
    args = findings.args
    if not args.num_experts:
        raise UsageError("the model has no experts (--num-experts), so there are no all-to-alls to overlap.")
    if args.expert_model_parallel_size == 1:
        raise UsageError(
            "--expert-model-parallel-size is 1: each rank has all experts, and nothing is sent. Raise it, or run stock."
        )
    if hybrid_pattern(args) is not None and (others := other_layers(args)) is not None:
        raise UsageError(f"models {others} can't be estimated.")
    factor = args.moe_expert_capacity_factor
    if args.moe_pad_expert_input_to_capacity and factor != 1:
        raise UsageError(
            f"--moe-pad-expert-input-to-capacity with --moe-expert-capacity-factor {factor:g} can't be estimated: "
            "padding would change the number of rows. Pass the factor 1."
        )
    samples, positions = micro_batch_shape(args, findings.config)
    sizes = {"micro_batch_size": samples, "seq_length": positions, "moe_router_topk": _sent_rows(args)}
    return Run(argparse.Namespace(**{**vars(args), **sizes}), findings, routing, saves_scores(args, findings.config))


def _sent_rows(args: argparse.Namespace) -> int:
    """Rows that are sent for a token, where even routing chooses each expert that returns its token like the others."""
    return max(1, round(args.moe_router_topk * args.num_experts / (args.num_experts + num_identity_experts(args))))


def allowed_of(run: Run) -> Allowed:
    """What the plans of the run may be.

    Raises:
        UsageError: the script asks for a plan that the run can't have.
    """
    args, config = run.args, run.findings.config
    limits = planning_limits(args, config)
    most = {dim: chunked_dim(args, config, dim).most_chunks for dim in ChunkDim}
    found = {one: dispatch_blocker(args, config, one) for one in Dispatch.known().values()}
    blockers = {one: blocker.reason for one, blocker in found.items() if blocker is not None}
    of_stock = allowed_dispatches(args, replace(config, dispatch=None))[0]  # it ignores the script's own --lancet flags
    return Allowed(limits, most, blockers, PLAIN if PLAIN in of_stock else of_stock[-1])

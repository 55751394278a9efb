"""From a launch to the run that is estimated: the dry run's findings, and what the plans of such a run may be."""

from dataclasses import replace

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.plan import saves_scores
from megatron_lancet.lab.dry_run.run import examine
from megatron_lancet.lab.estimate.candidates import Allowed
from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.model_profile import Run
from megatron_lancet.lab.launch.launch import Launch, as_dry_run
from megatron_lancet.lab.what_if.forecast import Routing
from megatron_lancet.schedule.dispatch import Dispatch
from megatron_lancet.schedule.plan import ChunkDim
from megatron_lancet.training.layer_pattern import hybrid_pattern, other_layers
from megatron_lancet.training.plan.dispatch import dispatch_blocker
from megatron_lancet.training.plan.limits import chunked_dim, planning_limits


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
    return Run(args, findings, routing, saves_scores(args, findings.config))


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
    return Allowed(limits, most, blockers)

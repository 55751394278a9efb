"""``lancet estimate``: from the command line to a report."""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence

from megatron_lancet.errors import UsageError
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.lab.estimate.arguments import cluster_of, launch_us_of
from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.devices import LAUNCH_US, LOCAL_LAUNCH_US, NO_LAUNCH_US, Span, Speeds, corners
from megatron_lancet.lab.estimate.estimate import estimates, rest_of_step
from megatron_lancet.lab.estimate.model_profile import Run
from megatron_lancet.lab.estimate.report import Estimated, as_plain, report
from megatron_lancet.lab.estimate.script import allowed_of, run_of
from megatron_lancet.lab.launch.launch import Launch, read_launch
from megatron_lancet.lab.what_if.forecast import Routing

_LOW_PRECISION = "matrix products count as bf16 products"


def run_command_line(options: argparse.Namespace, words: Sequence[str]) -> str:
    """Runs the command; returns its output.

    Args:
        options: the flags of ``arguments.add_arguments``.
        words: the launch.

    Raises:
        UsageError: the cluster or the launch is refused, or there is nothing to estimate.
    """
    logging.disable(logging.WARNING)
    if options.published:
        from megatron_lancet.lab.estimate.published import compared

        return compared()
    cluster, launch_us = cluster_of(options), launch_us_of(options)
    estimated = estimate_launch(read_launch(words, options.trust_script), cluster, options.routing, launch_us)
    if options.json is not None:
        atomic_write(options.json, json.dumps(as_plain(estimated), indent=1) + "\n")
    return report(estimated)


def estimate_launch(
    launch: Launch, cluster: ClusterChoice, routing: Routing, launch_us: Span | None = None
) -> Estimated:
    """Estimates a launch on a cluster.

    Args:
        launch_us: see :func:`speeds_of`.

    Raises:
        UsageError: see :func:`~megatron_lancet.lab.estimate.script.run_of`.
    """
    run = run_of(launch, cluster, routing)
    launch_us = launch_us_in(run, launch_us)
    ends = speeds_of(run, cluster, launch_us)
    rests = [rest_of_step(run, speeds) for speeds in ends]
    rest_ms = {name: (min(one[name] for one in rests), max(one[name] for one in rests)) for name in rests[0]}
    notes = tuple(_notes(run, launch, cluster))
    return Estimated(run, cluster, launch_us, estimates(run, ends, allowed_of(run)), rest_ms, notes)


def speeds_of(run: Run, cluster: ClusterChoice, launch_us: Span | None = None) -> list[Speeds]:
    """The corners of the ranges for a run on a cluster.

    Args:
        launch_us: host time of a kernel's launch; None for the range of the run's layers.
    """
    sizes = cluster.gpu, cluster.ranks_per_node, cluster.intra_gbps, cluster.inter_gbps
    return list(corners(*sizes, launch_us_in(run, launch_us)))


def launch_us_in(run: Run, asked: Span | None) -> Span:
    """Host time of a kernel's launch in a run: as asked, or else by its layers; none if CUDA graphs launch kernels.

    Raises:
        UsageError: the run has CUDA graphs, and a time is asked for.
    """
    if run.args.cuda_graph_impl == "none":
        return asked or (LOCAL_LAUNCH_US if run.args.transformer_impl == "local" else LAUNCH_US)
    if asked not in (None, NO_LAUNCH_US):
        raise UsageError(
            f"--launch-us has no effect with --cuda-graph-impl {run.args.cuda_graph_impl}: graphs launch the kernels. "
            "Drop one of the two."
        )
    return NO_LAUNCH_US


def _notes(run: Run, launch: Launch, cluster: ClusterChoice) -> Iterator[str]:
    args = run.args
    if launch.num_ranks not in (None, cluster.num_ranks):
        of_script = f"{launch.num_ranks} ranks ({launch.ranks_from})"
        yield f"the script starts {of_script}, the cluster has {cluster.num_ranks}, which count here"
    if args.fp8 or args.fp4:
        yield _LOW_PRECISION
    if not (args.bf16 or args.fp16):
        yield f"{_LOW_PRECISION}, although the run's are in fp32"
    if args.mtp_num_layers:
        yield "multi-token prediction is left out of times, not of memory"
    if args.window_size is not None:
        yield "attention counts as without --window-size"
    if args.context_parallel_size > 1:
        yield "messages of context parallelism are hidden behind the attention"
    given = run.findings.args
    if args.moe_router_topk != given.moe_router_topk:
        yield f"of the {given.moe_router_topk} rows of a token {args.moe_router_topk} are sent, others return it"
    if (args.micro_batch_size, args.seq_length) != (given.micro_batch_size, given.seq_length):
        yield f"each micro-batch is one sample of {args.seq_length} positions, the most that a bin has"

"""How far gradients move if hidden states are rounded in messages: ``--lancet-comm-dtype fp8`` against exact.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.parts.comm_dtype_accuracy --output accuracy.json

With ``--dispatch two-hop --ranks-per-node 2`` and four ranks, two neighbours count as a node.

One forward and backward of the benchmarks' GPT-MoE (fp32, expert parallelism over the ranks) on the same weights and
tokens. Errors are of all gradients of a kind together, relative to the norm of the exact ones. A rounded hidden state
may move a token to another expert, whose output is another one: how many of the choices differ is printed too. The
weights are fresh ones, whose router hardly prefers any expert: after training fewer tokens move.
"""

import argparse
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.cases import Shape
from benchmarks.harness.tables import aligned
from benchmarks.parts.frame import megatron_ranks, new_parser, parsed, write_result
from megatron_lancet.features.two_hop.order import TWO_HOP
from megatron_lancet.files.records import to_plain
from megatron_lancet.planning.dispatch import nodes_of_group
from megatron_lancet.schedule.comm_dtype import CommDtype
from megatron_lancet.schedule.dispatch import PLAIN, Dispatch
from megatron_lancet.schedule.nodes import Nodes
from megatron_lancet.schedule.plan import Plan, fixed_plan

_OTHER_PARAMETERS = "others"
_PATTERNS = {
    "expert weights": r"\.experts\.",
    "routers": r"\.router\.",
    "attention layers": r"\.self_attention\.",
    "norms": r"layer_?norm|norm\.",
    "embeddings": r"(^|\.)embedding\.",
    "output layer": r"(^|\.)output_layer\.",
}
"""Kinds of parameters, by a part of their names; the first pattern that fits counts."""
_KINDS = (*_PATTERNS, _OTHER_PARAMETERS)
_CHOICES = "choices that differ"
_LOSS = "loss"


@dataclass(frozen=True)
class StepResult:
    """One step of a rank: loss, gradients by parameter, the experts of its tokens in each layer, bytes sent."""

    loss: float
    gradients: dict[str, torch.Tensor]
    routing_maps: list[torch.Tensor]
    payload_bytes: int


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    shape = Shape()
    for name, default in (("layers", shape.layers), ("hidden", shape.hidden), ("experts", 8), ("topk", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the model ({default})")
    parser.add_argument("--seq-length", type=int, default=shape.seq_length, help=f"({shape.seq_length})")
    parser.add_argument("--chunks", type=int, default=2, help="of a micro-batch (2)")
    parser.add_argument("--dispatch", type=Dispatch.known().get, choices=list(Dispatch.known().values()), default=PLAIN)
    parser.add_argument("--ranks-per-node", type=int, help="neighbours that count as a node; only with two hops")
    args = parsed(parser, "wire_accuracy")
    if (args.dispatch is TWO_HOP) != (args.ranks_per_node is not None):
        parser.error("--dispatch two-hop and --ranks-per-node go together")
    return args


@contextmanager
def _recorded_routing(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The routing maps of all chunks and layers, as they come."""
    maps: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.router")]
    hooks = [router.register_forward_hook(lambda _, __, routed: maps.append(routed[1])) for router in routers]
    yield maps
    for hook in hooks:
        hook.remove()


def one_step(shape: Shape, plan: Plan, comm_dtype: CommDtype, nodes: Nodes | None) -> StepResult:
    """Runs the model with a format, from the same weights on every call. Collective."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from benchmarks.training_step.model import build, make_batches, make_forward
    from megatron_lancet.features.comm_dtype.feature import ActiveCommDtype
    from megatron_lancet.features.two_hop.feature import ActiveNodes
    from megatron_lancet.runtime.comm_stats import CommStats
    from megatron_lancet.training.overlap_setup import OverlapSetup

    cpu = torch.device("cpu")
    stats = CommStats(cpu)
    model = build(shape)
    timeout = timedelta(minutes=5)
    features = [ActiveNodes(nodes, cpu, stats, timeout), ActiveCommDtype(comm_dtype)]
    OverlapSetup(plan, cpu, stats, timeout, features=features)([model])
    # No reduction: gradients are of this rank's tokens, and of its experts for all tokens.
    DistributedDataParallel(model.config, DistributedDataParallelConfig(delay_wgrad_compute=True), model)
    (batch,) = make_batches(shape, dist.get_rank())
    with _recorded_routing(model) as maps:
        loss = make_forward(model, batch)()
        loss.backward()
    gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
    return StepResult(loss.item(), gradients, maps, stats.take().payload_bytes)


def _kind(parameter: str) -> str:
    return next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, parameter)), _OTHER_PARAMETERS)


def errors(found: StepResult, exact: StepResult) -> dict[str, float]:
    """Errors by kind of parameter, and of loss and choices; over all ranks. Collective."""
    squares: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, gradient in exact.gradients.items():
        for place, values in enumerate((found.gradients[name] - gradient, gradient)):
            squares[_kind(name)][place] += values.double().square().sum().item()
    chosen = [torch.stack(one.routing_maps) for one in (found, exact)]
    squares[_CHOICES] = [float((chosen[0] & ~chosen[1]).sum()), float(chosen[1].sum())]
    squares[_LOSS] = [abs(found.loss - exact.loss), exact.loss]
    kinds = [*_KINDS, _CHOICES, _LOSS]
    summed = torch.tensor([squares[kind] for kind in kinds], dtype=torch.float64)
    dist.all_reduce(summed)
    ratios = {kind: error / whole for kind, (error, whole) in zip(kinds, summed.tolist(), strict=True) if whole}
    return {kind: math.sqrt(ratio) if kind in _KINDS else ratio for kind, ratio in ratios.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Errors and bytes of each format; what goes into the file. Collective."""
    shape = Shape(args.layers, args.hidden, experts=args.experts, topk=args.topk, seq_length=args.seq_length)
    plan = fixed_plan(args.chunks, dispatch=args.dispatch)
    nodes = None
    if args.ranks_per_node is not None:
        found = nodes_of_group(dist.get_world_size(), 1, args.ranks_per_node)
        if isinstance(found, str):
            raise SystemExit(f"error: two hops need several ranks on each of several nodes, but {found}")
        nodes = found
    steps = {comm_dtype: one_step(shape, plan, comm_dtype, nodes) for comm_dtype in CommDtype}
    exact = steps[CommDtype.EXACT]
    rows = {
        comm_dtype: {**errors(step, exact), "bytes": step.payload_bytes / exact.payload_bytes}
        for comm_dtype, step in steps.items()
    }
    return {"shape": asdict(shape), "plan": str(plan), "nodes": to_plain(nodes), "relative_to_exact": rows}


def main() -> None:
    """Measure and print."""
    args = parse_arguments()
    warnings.simplefilter("ignore")  # Megatron names every package that it could use
    with megatron_ranks():
        if dist.get_world_size() == 1:
            raise SystemExit("error: expected several ranks, found 1, which sends nothing: torchrun --nproc-per-node 2")
        found = measure(args)
        is_first = dist.get_rank() == 0
    if is_first:
        rows = found["relative_to_exact"]
        print(aligned([["error", *rows], *([name, *(f"{rows[w][name]:.2g}" for w in rows)] for name in rows["exact"])]))
        write_result(args, found)


if __name__ == "__main__":
    main()

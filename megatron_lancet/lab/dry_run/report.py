"""Results of a dry run, and their report as text."""

import argparse
from dataclasses import dataclass, field
from itertools import groupby

from megatron_lancet.config import LancetConfig
from megatron_lancet.lab.dry_run.layout import Layout
from megatron_lancet.lab.dry_run.memory import Memory, MemoryByWay
from megatron_lancet.lab.dry_run.parameters import ModelSize
from megatron_lancet.lab.dry_run.plan import DescribedPlan
from megatron_lancet.lab.dry_run.stages import PipelineStage

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}
_HOW = (
    "weights, gradients, optimizer: counted weight by weight, shared out as the distributed optimizer does",
    "activations: tensors that autograd keeps of the micro-batches in flight, for balanced routing, and tensors "
    "recomputed at a time; no workspaces, no buffers of communication, no fragmentation: leave a margin",
)


@dataclass
class Findings:
    """Results of a dry run.

    Attributes:
        target: number of ranks, its source, and the machines that the run was validated for.
        memory: memory of a rank of each pipeline stage.
        memory_by_way: the same for each way to run the layers.
        config: settings of the overlap.
        plan: lines that describe the plan.
        changes: a line for each setting of the script that the run changes.
        warnings: a line for each problem that the run itself may not have.
        gpu_bytes: memory of a GPU; None for a run on CPUs.
    """

    args: argparse.Namespace
    target: str
    layout: Layout
    stages: list[PipelineStage]
    size: ModelSize
    memory: list[Memory]
    memory_by_way: MemoryByWay
    config: LancetConfig
    plan: list[str]
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    gpu_bytes: float | None = None

    @property
    def missing_bytes(self) -> float:
        """Memory that the fullest rank needs beyond a GPU's; 0 if the run fits, or runs on CPUs."""
        if self.gpu_bytes is None:
            return 0.0
        return max(0.0, max(memory.total for memory in self.memory) - self.gpu_bytes)


def report(findings: Findings) -> str:
    """Writes the report."""
    unit = "GiB" if max(memory.total for memory in findings.memory) >= _UNITS["GiB"] else "MiB"
    sections = [
        ("model", model_lines(findings)),
        ("layout", layout_lines(findings)),
        (f"memory of a GPU, {unit}", _memory(findings, _UNITS[unit])),
        ("plan", findings.plan),
        ("changed settings", findings.changes),
        ("warnings", findings.warnings),
    ]
    text = [f"Megatron-Lancet dry run: {findings.target}"]
    for title, lines in sections:
        text += [title, *(f"  {line}" for line in lines)] if lines else []
    return "\n".join([*text, _verdict(findings)])


def _verdict(findings: Findings) -> str:
    number = len(findings.warnings)
    warnings = f"{number} warning{'s' * (number != 1)}"
    if findings.gpu_bytes is None:
        return f"dry run passed, {warnings}"
    needed = [memory.total for memory in findings.memory]
    found = f"{max(needed) / _UNITS['GiB']:.2f} GiB of {findings.gpu_bytes / _UNITS['GiB']:.1f}"
    if findings.missing_bytes == 0:
        return f"dry run passed, {warnings}; memory: {found}"
    return (
        f"dry run: the arguments pass, but stage {needed.index(max(needed))} does not fit: it needs {found} "
        f"(--gpu-memory-gb sets a GPU's), {warnings}"
    )


def always_pairs(plan: DescribedPlan) -> bool:
    """Whether the run pairs backwards with forwards, whatever tuning finds."""
    if plan.limits is not None:
        return plan.limits.pairing == (True,)
    return plan.plan is not None and plan.plan.is_paired


def pairing_lines(plan: DescribedPlan, memory: list[Memory], paired: list[Memory]) -> list[str]:
    """Describes what pairing does to the memory of a GPU.

    Args:
        memory: as estimated for the plan, by pipeline stage.
        paired: the same with backwards paired with forwards.
    """
    if always_pairs(plan):
        return ["the activations above include a forward that runs during a backward"]
    if plan.limits is None or True not in plan.limits.pairing:
        return []
    more = max(one.activations - other.activations for one, other in zip(paired, memory, strict=True))
    name = "GiB" if more >= _UNITS["GiB"] else "MiB"
    return [
        f"paired micro-batches need up to {more / _UNITS[name]:.2f} {name} of activations beyond the estimate above"
    ]


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"


def model_lines(findings: Findings) -> list[str]:
    """Parameters and shape of the model."""
    args, size = findings.args, findings.size
    experts = f", {args.num_experts} experts, top-{args.moe_router_topk}" if args.num_experts else ""
    largest, smallest = (choose(held.all for held in size.held) for choose in (max, min))
    on_rank = _billions(largest) if largest == smallest else f"{_billions(smallest)} to {_billions(largest)}"
    return [
        f"parameters      {_billions(size.total)}, active per token {_billions(size.active)}, on a rank {on_rank}",
        f"shape           {args.num_layers} layers, hidden {args.hidden_size}{experts}, sequence {args.seq_length}, "
        f"vocabulary {args.padded_vocab_size} with padding",
    ]


def layout_lines(findings: Findings) -> list[str]:
    """Parallel sizes and batch of the run."""
    one, args = findings.layout, findings.args
    runs = [(count, len(list(same))) for count, same in groupby(len(stage.layers) for stage in findings.stages)]
    by_rank = ", ".join(f"{count}" if times == 1 else f"{times} x {count}" for count, times in runs)
    spread = f"{runs[0][0]} layers on each rank" if len(runs) == 1 else f"layers by rank: {by_rank}"
    return [
        f"ranks           {one.num_ranks} = TP {one.tensor} x CP {one.context} x PP {one.pipeline} x DP {one.data}",
        f"experts         EP {one.expert} x ETP {one.expert_tensor} x PP {one.pipeline} x expert-DP {one.expert_data}",
        f"pipeline        PP {one.pipeline} x {one.virtual} virtual; {spread}",
        f"batch           {args.global_batch_size} = {args.micro_batch_size} (micro-batch) x DP {one.data} x "
        f"{one.num_micro_batches} (gradient accumulation)",
    ]


def _memory(findings: Findings, unit_bytes: int) -> list[str]:
    columns = ("stage", "weights", "gradients", "optimizer", "activations", "total")
    lines = ["  ".join(f"{name:>11}" for name in columns)]
    start = 0
    for memory, same in groupby(findings.memory):
        last = start + len(list(same)) - 1
        name = str(start) if start == last else f"{start}-{last}"
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
        lines.append("  ".join([f"{name:>11}", *(f"{part / unit_bytes:>11.2f}" for part in parts)]))
        start = last + 1
    offloaded = max(memory.offloaded for memory in findings.memory)
    on_host = [f"optimizer in the host's memory: {offloaded / unit_bytes:.2f} a rank"] if offloaded else []
    return [*lines, *on_host, *_HOW]

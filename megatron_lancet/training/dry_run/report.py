"""The dry run's report as text."""

from itertools import groupby

from megatron_lancet.training.dry_run.findings import Findings
from megatron_lancet.training.dry_run.memory import Memory

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}
_HOW = (
    "weights, gradients, optimizer: counted weight by weight, shared out as the distributed optimizer does",
    "activations: what autograd keeps of the micro-batches in flight, for balanced routing, and what is recomputed at "
    "once; no workspaces, no buffers of communication, no fragmentation: leave room",
)


def report(findings: Findings) -> str:
    """The whole report."""
    sections = [
        ("", [f"Megatron-Lancet dry run: {findings.target}"]),
        ("model", _model(findings)),
        ("layout", _layout(findings)),
        (f"memory of a GPU, {_unit(findings)}", _memory(findings)),
        ("plan", findings.plan),
        ("changed settings", findings.changes),
        ("warnings", findings.warnings),
    ]
    text = []
    for title, lines in sections:
        if not lines:
            continue
        text += [title, *(f"  {line}" for line in lines)] if title else lines
    num_warnings = len(findings.warnings)
    return "\n".join([*text, f"dry run passed, {num_warnings} warning{'s' * (num_warnings != 1)}"])


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"


def _model(findings: Findings) -> list[str]:
    args, size = findings.args, findings.size
    experts = f", {args.num_experts} experts, top-{args.moe_router_topk}" if args.num_experts else ""
    largest, smallest = (choose(held.all for held in size.held) for choose in (max, min))
    on_rank = _billions(largest) if largest == smallest else f"{_billions(smallest)} to {_billions(largest)}"
    return [
        f"parameters      {_billions(size.total)}, active per token {_billions(size.active)}, on a rank {on_rank}",
        f"shape           {args.num_layers} layers, hidden {args.hidden_size}{experts}, sequence {args.seq_length}, "
        f"vocabulary {args.padded_vocab_size} with padding",
    ]


def _layout(findings: Findings) -> list[str]:
    one, args = findings.layout, findings.args
    layers = [len(stage.layers) for stage in findings.stages]
    spread = f"{layers[0]} layers on each rank" if len(set(layers)) == 1 else f"layers by rank: {_listed(layers)}"
    return [
        f"ranks           {one.num_ranks} = TP {one.tensor} x CP {one.context} x PP {one.pipeline} x DP {one.data}",
        f"experts         EP {one.expert} x ETP {one.expert_tensor} x PP {one.pipeline} x expert-DP {one.expert_data}",
        f"pipeline        PP {one.pipeline} x {one.virtual} virtual; {spread}",
        f"batch           {args.global_batch_size} = {args.micro_batch_size} (micro-batch) x DP {one.data} x "
        f"{one.num_micro_batches} (gradient accumulation)",
    ]


def _listed(counts: list[int]) -> str:
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ", ".join(f"{count}" if times == 1 else f"{times} x {count}" for count, times in runs)


def _unit(findings: Findings) -> str:
    """Unit in which the memory is read best."""
    return "GiB" if max(memory.total for memory in findings.memory) >= _UNITS["GiB"] else "MiB"


def _memory(findings: Findings) -> list[str]:
    unit_bytes = _UNITS[_unit(findings)]
    columns = ("stage", "weights", "gradients", "optimizer", "activations", "total")
    lines = ["  ".join(f"{name:>11}" for name in columns)]
    start = 0
    for memory, same in groupby(findings.memory):
        last = start + len(list(same)) - 1
        name = str(start) if start == last else f"{start}-{last}"
        lines.append("  ".join(f"{text:>11}" for text in (name, *_parts(memory, unit_bytes))))
        start = last + 1
    offloaded = max(memory.offloaded for memory in findings.memory)
    on_host = [f"optimizer in the host's memory: {offloaded / unit_bytes:.2f} a rank"] if offloaded else []
    return [*lines, *on_host, *_HOW]


def _parts(memory: Memory, unit_bytes: int) -> list[str]:
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
    return [f"{part / unit_bytes:.2f}" for part in parts]

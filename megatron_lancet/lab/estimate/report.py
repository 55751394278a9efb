"""The estimate as text, and as plain figures for a file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lancet.lab.dry_run.report import layout_lines, model_lines
from megatron_lancet.lab.estimate.candidates import STOCK
from megatron_lancet.lab.estimate.cluster_text import ClusterChoice
from megatron_lancet.lab.estimate.devices import LINK_REACHED, MESSAGE_SMS, PEER_US, REACHED, Rate, Span
from megatron_lancet.lab.estimate.estimate import Estimate, fastest
from megatron_lancet.lab.estimate.model_profile import Run
from megatron_lancet.report.tables import right_aligned

_GIB = 1 << 30
_NOT_WORTH = 1.02
"""Speed-up in the middle of the range up to which another plan is not worth a change."""
_AGAINST_PUBLISHED = "in three of four published runs, overlap brought less than predicted: --published"
_FULL = 0.95
"""Part of a GPU's memory that a run can use: the rest is the driver's and NCCL's."""


@dataclass(frozen=True)
class Estimated:
    """Everything that a report shows.

    Attributes:
        launch_us: host time of a kernel's launch.
        found: stock first.
        rest_ms: (low, high) milliseconds of a step outside forward and backward, by what takes them.
        notes: a line for each thing that differs from the script.
    """

    run: Run
    cluster: ClusterChoice
    launch_us: Span
    found: Sequence[Estimate]
    rest_ms: dict[str, tuple[float, float]]
    notes: Sequence[str] = ()


def report(estimated: Estimated) -> str:
    """Writes the report."""
    findings = estimated.run.findings
    sections = [
        ("model", model_lines(findings)),
        ("layout", layout_lines(findings)),
        ("plans, each figure from the lowest to the highest end of the ranges", list(_table(estimated))),
        (
            "not possible",
            [f"{one.candidate.name}: {one.candidate.why_not}" for one in estimated.found if not one.figures],
        ),
        ("assumptions", list(assumptions(estimated))),
        ("try first", list(_advice(estimated))),
    ]
    text = [f"Megatron-Lancet estimate: {estimated.cluster}; nothing was measured"]
    for title, lines in sections:
        text += [title, *(f"  {line}" for line in lines)] if lines else []
    return "\n".join(text)


def as_plain(estimated: Estimated) -> dict[str, Any]:
    """The figures for a file: each range as [low, high]; times in ms, memory in bytes."""
    stock = estimated.found[0]
    return {
        "cluster": str(estimated.cluster),
        "plans": {
            one.candidate.name: {
                "plan": str(one.candidate.plan),
                "flags": one.candidate.flags,
                "step_ms": one.range_of("step_ms"),
                "exposed_share": one.range_of("exposed_share"),
                "bubble_ms": one.range_of("bubble_ms"),
                "speedup": one.speedup(stock),
                "memory_bytes": one.memory,
            }
            for one in estimated.found
            if one.figures
        },
        "not_possible": {one.candidate.name: one.candidate.why_not for one in estimated.found if not one.figures},
        "rest_ms": estimated.rest_ms,
        "assumptions": list(assumptions(estimated)),
    }


def _table(estimated: Estimated) -> Iterator[str]:
    stock = estimated.found[0]
    rows = [["plan", "step ms", "times stock", "exposed", "bubble ms", "memory GiB"]]
    for one in estimated.found:
        if one.figures:
            low, high = one.range_of("exposed_share")
            memory = " to ".join(f"{size / _GIB:.1f}" for size in one.memory)
            speedup = "1" if one is stock else _span(*one.speedup(stock), ".2f")
            step, bubble = (_span(*one.range_of(name), ".0f") for name in ("step_ms", "bubble_ms"))
            rows.append([one.candidate.name, step, speedup, f"{_span(100 * low, 100 * high, '.0f')} %", bubble, memory])
    width = max(len(row[0]) for row in rows)
    yield from right_aligned([[row[0].ljust(width), *row[1:]] for row in rows])


def _span(low: float, high: float, form: str) -> str:
    texts = format(low, form), format(high, form)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def assumptions(estimated: Estimated) -> Iterator[str]:
    """Yields the assumptions, one a line."""
    args, cluster, gpu = estimated.run.args, estimated.cluster, estimated.cluster.gpu
    near, far = (f"{PEER_US[level].fast:g} to {PEER_US[level].slow:g} us" for level in ("intra", "inter"))
    yield (
        f"{estimated.cluster.name.upper()}: {gpu.flops_per_s / 1e12:g} TFLOP/s in bf16, of which large products reach "
        f"{REACHED[Rate.PRODUCT].percent}, experts {REACHED[Rate.GROUPED].percent}, attention "
        f"{REACHED[Rate.ATTENTION].percent}"
    )
    yield f"memory traffic: {REACHED[Rate.NONE].percent} of {gpu.bytes_per_s / 1e12:g} TB/s"
    yield (
        f"links: {LINK_REACHED.percent} of {cluster.intra_gbps:g} and {cluster.inter_gbps:g} Gb/s; to each peer {near} "
        f"inside a node and {far} between nodes"
    )
    yield f"a message takes {MESSAGE_SMS.fast:g} to {MESSAGE_SMS.slow:g} of {gpu.num_sms} SMs from concurrent kernels"
    if args.cuda_graph_impl != "none":
        yield "launches cost nothing, because of CUDA graphs; with them the run keeps stock modules"
    else:
        kernels = "local layers" if args.transformer_impl == "local" else "Transformer Engine"
        launch_us = _span(estimated.launch_us.fast, estimated.launch_us.slow, "g")
        yield f"a launch takes the host {launch_us} us (--launch-us); kernels of {kernels}"
    yield f"routing: {estimated.run.routing}; dedup and two hops send as many rows as random choices of experts need"
    plan = estimated.found[0].candidate.plan
    if plan is not None and not plan.dispatch.is_plain:
        yield f"dispatch: {plan.dispatch}, also in stock, because of --moe-token-dispatcher-type flex"
    yield f"attention is {'unfused' if estimated.run.saves_scores else 'fused'} and causal, in all plans"
    rest = (f"{name} {_span(*ends, '.0f')} ms" for name, ends in estimated.rest_ms.items())
    yield f"outside the micro-batches: {', '.join(rest)}"
    hidden = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(args, name)]
    if "overlap_grad_reduce" in hidden:
        yield "gradient reductions share the links with the last micro-batch's all-to-alls"
    if "overlap_param_gather" in hidden:
        yield "the gather of weights is hidden behind the first forward"
    if args.recompute_granularity == "full" or "moe" in (args.recompute_modules or ()):
        yield "stock's recompute repeats the all-to-alls of the forward; a plan keeps their rows, counted as plain ones"
    yield (
        "memory: the dry run's, and deferred weight gradients; its high end adds a fifth of the activations, and two "
        "messages"
    )
    yield _AGAINST_PUBLISHED
    yield from estimated.notes


def _advice(estimated: Estimated) -> Iterator[str]:
    stock, best = estimated.found[0], fastest(estimated.found)
    if best.candidate.name == STOCK or stock.mean_step_ms / best.mean_step_ms < _NOT_WORTH:
        yield "stock: no plan is faster by 2 % in the middle of the range"
    else:
        ends = _span(*best.speedup(stock), ".2f")
        yield f"pretrain_gpt_moe.py with {best.candidate.flags}: {ends} times stock's speed ({best.candidate.name})"
        yield "or --lancet-plan auto (default), which measures the first steps and finds the plan itself"
        if best.speedup(stock)[0] < 1:
            yield "at one end of the ranges it is slower than stock: auto goes back if it does not pay"
    room = _FULL * estimated.cluster.gpu.memory_bytes
    if best.memory[1] > room:
        word = "does not fit" if best.memory[0] > room else "may not fit"
        size = estimated.cluster.gpu.memory_bytes / _GIB
        yield f"memory {word} a GPU of {size:.0f} GiB: recompute more, raise parallel sizes, lower --micro-batch-size"
    plan = estimated.run.findings.plan[0]
    if plan.startswith("off: "):
        yield f"first remove what keeps stock modules: {plan.removeprefix('off: ')}"

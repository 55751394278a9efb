"""Writes down what the check's steps are to take on a GPU: ``python -m benchmarks.gpu.check.predict``.

The steps are those that the check times, on a virtual GPU: what they enqueue is real, and how long it takes comes from
a model of the device. Nothing is measured. The file is the same wherever it is made again with the same versions.
"""

import argparse
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check.predict import DEVICES, committed, hash_of
from benchmarks.gpu.check.predict.file import as_text
from benchmarks.harness.origin import PACKAGES, commit_of_checkout, versions_of
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, Plan, fixed_plan
from megatron_lancet.testkit.mock.link import Link

SIZE = "qwen3-like"
LINKS = ("10:350", "10:45")
IDEAL = "ideal"
"""Stock with a free link: a message is a copy in the device's memory."""
_WHOLE = "ours k=1"
"""Variant in one chunk, which the simulator's cost model starts from, and whose plan stands for stock there."""
_LIKE = {"pairs": _WHOLE, "dedup pairs": "dedup"}
"""Variants with pairs, and those with the same ops."""
_NOT_SIMULATED = "the planner has plans of this project only"


def work() -> Any:
    """The work of each variant in the timed steps."""
    from benchmarks.gpu.check.part import timing
    from benchmarks.gpu.variants import Work

    return Work(timing.SIZE, timing.NUM_RANKS, timing.NUM_MICRO_BATCHES, torch.device("cuda"))


def not_predicted() -> dict[str, str]:
    """Variants of the benchmark without a prediction, and why."""
    from benchmarks.gpu.variants import PLANS

    reason = "it cuts a micro-batch into chunks of samples, which the check does not time"
    return {name: reason for name, plan in PLANS.items() if plan is not None and _cuts_samples(plan)}


def _cuts_samples(plan: Plan) -> bool:
    return any(one.num_chunks > 1 and one.chunk_dim is ChunkDim.BATCH for one in plan.segments)


def plans() -> dict[str, Plan | None]:
    """Plans of the variants that are predicted; None where Megatron's own modules run."""
    from benchmarks.gpu.variants import PLANS

    without = not_predicted()
    return {name: plan for name, plan in PLANS.items() if name not in without}


def predict(device: str, links: Sequence[str] = LINKS) -> dict[str, Any]:
    """The prediction, as the file has it.

    Args:
        device: of :data:`DEVICES`.
        links: latency in us and bandwidth in GB/s each, as ``Link.parse`` reads them.
    """
    from benchmarks.gpu.check.predict.recorded import record
    from benchmarks.gpu.variants import Variant
    from megatron_lancet.training.platform.cpu import cpu_platform

    torch.set_num_threads(1)
    with cpu_platform():
        steps = {name: record(Variant.named(name), work()) for name in plans()}
    commit, is_dirty = commit_of_checkout()
    return {
        "device": device,
        "made_by": {"commit": commit, "is_dirty": is_dirty, "versions": versions_of(PACKAGES)},
        "assumptions": _assumptions(device),
        "variants": variants(device, links, steps),
        "not_predicted": not_predicted(),
        "not_simulated": {name: _NOT_SIMULATED for name, plan in plans().items() if plan is None and name != "stock"},
    }


def variants(device: str, links: Sequence[str], steps: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by variant, link, and ``modelled`` or ``simulated``.

    Args:
        steps: recorded steps by variant. Plans with pairs need the same without, and all plans one chunk.
    """
    from benchmarks.gpu.check.predict.recorded import modelled
    from benchmarks.gpu.variants import STOCK

    bytes_per_s, found = DEVICES[device], {}
    for name, step in steps.items():
        found[name] = {link: {"modelled": modelled(step.log, bytes_per_s, Link.parse(link))} for link in links}
    if STOCK in steps:
        ideal = modelled(steps[STOCK].log, bytes_per_s, Link())
        found[IDEAL] = {link: {"modelled": ideal} for link in links}
    for link in links:
        for name, figures in _simulated(steps, bytes_per_s, Link.parse(link)).items():
            found[name][link]["simulated"] = figures
    return found


def _simulated(steps: Mapping[str, Any], bytes_per_s: float, link: Link) -> dict[str, Any]:
    from benchmarks.gpu.check.predict.simulated import simulated
    from benchmarks.gpu.variants import PLANS, STOCK

    planned = {name: (plan, steps[name]) for name, plan in PLANS.items() if plan is not None and name in steps}
    if not planned:
        return {}
    whole = planned[_WHOLE]
    found = {}
    for name, (plan, _) in planned.items():
        found[name] = simulated(plan, planned[_LIKE.get(name, name)], whole, bytes_per_s, link)
    if STOCK in steps:
        alone = fixed_plan(1, DwPolicy.NONE)
        found[STOCK] = simulated(alone, whole, whole, bytes_per_s, link)
        found[IDEAL] = simulated(alone, whole, whole, bytes_per_s, Link())
    return found


def _assumptions(device: str) -> dict[str, Any]:
    from benchmarks.gpu.check.predict.recorded import LAUNCH_US, LAUNCHES_US, device_model

    model = device_model(DEVICES[device], Link())
    return {
        "flops_per_s": model.flops_per_s,
        "bytes_per_s": model.bytes_per_s,
        "min_kernel_us": model.min_kernel_us,
        "launch_us": LAUNCH_US,
        "launches_us": LAUNCHES_US,
        "event_us": model.event_us,
        "collective_us": model.collective_us,
        "host_wait_us": model.host_wait_us,
        "connections": model.connections,
        "num_sms": model.num_sms,
        "message_sms": model.message_sms,
        "one_link": model.one_link,
        "size": {"name": SIZE, **asdict(work().size)},
        "num_ranks": work().num_ranks,
        "num_micro_batches": work().num_micro_batches,
        "text": [
            "a kernel takes the longest of its FLOP by flops_per_s, its bytes by bytes_per_s, and min_kernel_us; the "
            "host takes launch_us for it, Python and autograd included",
            "while a message is on the wire, kernels of other streams run at (num_sms - message_sms) / num_sms speed",
            "a link is LATENCY_US:GBYTES_PER_S; messages of all groups queue for it, token counts among them",
            "each expert gets as many tokens as any other, and each choice of experts is equally likely",
            "functions that Megatron would compile run operator by operator, and no op is from Transformer Engine",
            f"{IDEAL}: stock, and a message is a copy in the device's memory",
            "exposed: a message is on the wire, and no kernel runs; simulated: compute waits for a message",
            "simulated: launches are free, op times are those of the modelled steps; stock is one chunk without "
            f"deferred weight gradients, in this project's modules; in {IDEAL} a message takes as long as its copy",
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the file, and prints its hash."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.check.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=DEVICES, default="H100", help="whose memory is as fast (H100)")
    parser.add_argument("--output", type=Path, help="the file (the committed one of the device)")
    parser.add_argument(
        "--link", nargs="+", default=list(LINKS), metavar="LATENCY_US:GBYTES_PER_S", help=f"links ({' '.join(LINKS)})"
    )
    args = parser.parse_args(argv)
    path = args.output or committed(args.device)
    for link in args.link:
        try:
            Link.parse(link)
        except ValueError as error:
            raise UsageError(f"--link: {error}") from None
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}.")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path.write_text(as_text(predict(args.device, args.link)))
    print(f"{path} written, SHA-256 {hash_of(path)}")


if __name__ == "__main__":
    run_command(main)

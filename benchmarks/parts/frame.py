"""What the scripts of this folder share: the command line, turns of variants, paired ratios, the result file."""

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import machine_speed
from benchmarks.harness.origin import finished, origin
from benchmarks.harness.samples import Spread, spread


def new_parser(description: str | None, repeats: int | None = None) -> argparse.ArgumentParser:
    """With ``--output``, and with ``--repeats`` where a default is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"of each variant in each case ({repeats})")
    parser.add_argument("--output", type=Path, help="JSON with every sample, and where they come from")
    return parser


def parsed(parser: argparse.ArgumentParser, name: str, packages: Sequence[str] = ()) -> argparse.Namespace:
    """Parses the command line; sets ``origin`` to the results' origin, or to None on a rank that writes no results.

    Args:
        name: the script's name without suffix; its dotted name if it is not in this folder.
        packages: packages to record the versions of, in addition to torch and Megatron.
    """
    args = parser.parse_args()
    writes = args.output is not None and os.environ.get("RANK", "0") == "0"
    module = name if "." in name else f"benchmarks.parts.{name}"
    args.origin = origin(module, packages=packages) if writes else None
    return args


def timed_pairs(variants: Mapping[str, Callable[[], float]], num_repeats: int) -> dict[str, list[float]]:
    """Samples of each variant; entry i of all of them comes from the same repeat.

    Args:
        variants: by name, what runs one once and returns its time. They take turns, in an order that is shuffled in
            each repeat, and the same on all ranks.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    dice = random.Random(0)  # noqa: S311 - an order, no secret
    for _ in range(num_repeats):
        for name in dice.sample(list(variants), len(variants)):
            samples[name].append(variants[name]())
    return samples


def timed_ms(run: Callable[[], object]) -> float:
    """Milliseconds that one call takes."""
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) * 1e3


def paired_ratios(reference: Sequence[float], own: Sequence[float]) -> Spread:
    """Of the reference's sample over the variant's in the same repeat: above 1 where the variant is faster."""
    return spread([a / b for a, b in zip(reference, own, strict=True)])


def rounded(samples: Mapping[str, Sequence[float]], digits: int) -> dict[str, list[float]]:
    """The samples as they are written."""
    return {name: [round(value, digits) for value in values] for name, values in samples.items()}


def write_result(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the result and its origin; nothing without ``--output``.

    Args:
        args: the result of :func:`parsed`.
    """
    if args.origin is not None:
        found = finished(args.origin)
        print(machine_speed.described(found["machine_speed"]))
        args.output.write_text(json.dumps({**found, **result}) + "\n")


@contextmanager
def megatron_ranks() -> Iterator[None]:
    """Megatron on CPU ranks over gloo, which share the experts: those that torchrun started, else a single one."""
    logging.disable(logging.WARNING)  # Megatron's, of every model that is built
    import torch.distributed as dist

    from megatron_lancet.training.platform.cpu import cpu_platform

    with cpu_platform():
        from megatron.core import parallel_state

        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
        )
        yield
        dist.barrier()
        dist.destroy_process_group()

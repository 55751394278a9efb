"""Makes a profile for the planner from torch.profiler's traces of an ordinary Megatron run.

  lancet trace profile DIR/../torch_profile/rank-*.json.gz --output profile.json
  lancet plan make profile.json --output plan.json
  lancet plan simulate profile.json

Record some steps with Megatron's own flags; docs/from_trace.md has them, and says what a trace can't show.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.cli.arguments import positive_float
from megatron_lancet.cli.planning import check_outputs
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.from_trace.profile import STOCK, profile_from_traces
from megatron_lancet.planning.profile import Profile


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="traces (.json or .json.gz) of one rank or, better, of all ranks of an expert-parallel group",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="PROFILE", help="file for the profile (JSON)")
    parser.add_argument(
        "--compute-slowdown",
        type=positive_float,
        metavar="FACTOR",
        help="factor by which a message slows down concurrent compute, which a run without overlap does not show "
        "(default: by the multiprocessors that NCCL's kernels take; 1 on a CPU)",
    )
    return parser.parse_args(argv)


def summary(profile: Profile, num_traces: int) -> str:
    """What was read, in two lines."""
    model = profile.model
    messages_ms = sum(ms for _, ms in profile.link.all_to_all[-1:])
    return (
        f"{num_traces} trace{'s' if num_traces > 1 else ''} on {profile.device}: {len(model.layer_kinds)} layers, "
        f"{model.num_experts} experts (top {model.topk}) on {model.ep_size} ranks, {model.num_micro_batches} "
        f"micro-batches of {model.micro_batch_size} x {model.seq_length} tokens\n"
        f"measured step {profile.measured_steps_ms[STOCK]:.1f} ms; the largest all-to-alls take {messages_ms:.2f} ms"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    check_outputs(arguments.output)
    try:
        profile = profile_from_traces(arguments.traces, arguments.compute_slowdown)
    except RecordError as error:
        raise UsageError(str(error)) from error
    atomic_write(arguments.output, profile.to_json() + "\n")
    print(summary(profile, len(arguments.traces)))


if __name__ == "__main__":
    run_command(main)

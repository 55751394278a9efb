"""Runs the whole pipeline on one machine: corpus, tokenizer, expert-parallel training, resume, validation, sample.

It trains a small GPT-MoE on the sources of Python's standard library. The short demo trains it twice, stock and ours in
turns, on two CPU ranks with a link between them that is really waited for; --long trains longer, without comparison, on
two CPU ranks or on the available GPUs. Both write summary.json, report.json, pictures and logs into the output folder.
Prepared data is reused; training always starts from scratch. Flags after -- go to Megatron and override the demo's.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.demo.folder import REPOSITORY
from benchmarks.demo.links.link import IN_USER_NAMESPACE, NAMESPACES, PACED, enter_user_namespace
from benchmarks.harness.runner import exit_on_signals
from megatron_lancet.cli.arguments import positive_float, positive_int
from megatron_lancet.errors import run_command

_DEFAULTS = {
    False: {"output": "demo", "train_iters": 48, "vocab_size": 512, "corpus_megabytes": 3.0},
    True: {"output": "demo-long", "train_iters": 500, "vocab_size": 2048, "corpus_megabytes": None},
}
"""Of the short demo and of the long one."""
MIN_STEPS = 16
"""Of the short demo: two turns of four to set the link's rate, and steps to measure."""


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--long", action="store_true", help="500 steps of a larger model, without comparison")
    add("--output", type=Path, metavar="DIR", help="default: runs/demo, with --long runs/demo-long")
    add("--train-iters", type=positive_int, metavar="N", help="training steps (48; 500)")
    add("--vocab-size", type=positive_int, metavar="N", help="pieces of the tokenizer (512; 2048)")
    add("--corpus-megabytes", type=positive_float, metavar="N", help="use only the first N million bytes (3; all)")
    add(
        "--link",
        choices=("auto", NAMESPACES, PACED),
        default="auto",
        help="of the short demo: network namespaces with a capped link, or a transport that holds messages back as "
        "long (default: namespaces where this machine allows them)",
    )
    add("--rate", type=positive_float, metavar="MBIT", help="of that link; by default stock waits 45 %% of its step")
    add(IN_USER_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    add("megatron_flags", nargs="*", metavar="FLAG", help="after --: further flags of Megatron")
    arguments = parser.parse_args(argv)
    for name, value in _DEFAULTS[arguments.long].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, REPOSITORY / "runs" / str(value) if name == "output" else value)
    least = 2 if arguments.long else MIN_STEPS
    if arguments.train_iters < least:
        parser.error(f"--train-iters must be at least {least}: steps before the resume and after it")
    return arguments


def main() -> None:
    """Runs the command."""
    argv = sys.argv[1:]
    arguments = parse_arguments(argv)
    root = arguments.output.resolve()
    data = arguments.vocab_size, arguments.corpus_megabytes
    if arguments.long:
        from benchmarks.demo.long_run import run_long

        run_long(root, arguments.train_iters, *data, arguments.megatron_flags)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the short demo runs on CPU ranks wherever it is
    enter_user_namespace(arguments.link, argv)
    from benchmarks.demo.short_run import run_short

    run_short(
        root,
        arguments.train_iters,
        *data,
        link_kind=arguments.link,
        rate_bps=arguments.rate * 1e6 if arguments.rate else None,
        is_unprivileged=arguments.in_user_namespace,
        extra=arguments.megatron_flags,
    )


if __name__ == "__main__":
    exit_on_signals()  # the default handlers would end this process without its ranks
    try:
        run_command(main)
    except KeyboardInterrupt:
        print("interrupted: the training was stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)

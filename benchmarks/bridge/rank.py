"""A rank that trains in Megatron-Bridge's loop, in blocks of steps as the parent asks.

``python -m benchmarks.bridge.rank --core 0 --records 5 --interface NAME --data PREFIX --tokenizer FILE --cache FOLDER``

Orders and records are the same as for :mod:`benchmarks.demo.rank`.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo.rank import PR_SET_PDEATHSIG, READY, Gate, core_attention


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.bridge.rank", description=__doc__)
    parser.add_argument("--core", type=int, required=True, help="that this rank runs on")
    parser.add_argument("--records", type=int, required=True, help="file descriptor that gets a line for each step")
    parser.add_argument("--interface", required=True, help="whose rate is capped")
    parser.add_argument("--data", type=Path, required=True, help="prefix of the data")
    parser.add_argument("--tokenizer", type=Path, required=True, help="of the data")
    parser.add_argument("--cache", type=Path, required=True, help="of the data's indices")
    parser.add_argument("--settings", type=json.loads, help="of the overlap, as JSON; none for stock")
    return parser.parse_args(argv)


def _train(args: argparse.Namespace, status: Any) -> None:
    from megatron_lancet.training.platform.cpu import cpu_platform
    from tests.bridge import gaps

    with cpu_platform(), ExitStack() as stack:
        from benchmarks.demo.links.rank_link import RankLink

        link = RankLink(args.interface)
        stack.enter_context(link.carries_reductions())
        stack.enter_context(link.carries_ours())
        stack.enter_context(gaps.filled())
        from megatron.bridge.training import initialize
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        from benchmarks.bridge.configuration import configuration
        from megatron_lancet.library.bridge import enable

        # Bridge has taken it by name before the platform replaced it; the wheel of Megatron has it compiled.
        initialize.compile_helpers = lambda: None
        config = configuration(args)
        overlap = [] if args.settings is None else enable(config, **args.settings)
        status.describe = lambda: "in Megatron-Bridge's loop"
        pretrain(config, forward_step, callbacks=[_observer(args, link), *overlap])


def _observer(args: argparse.Namespace, link: Any) -> Any:
    """The callback that tells the parent about each training step."""
    import torch.distributed as dist
    from megatron.bridge.training.callbacks import Callback

    gate = Gate(link.pace)

    def write(line: str) -> None:
        os.write(args.records, f"{line}\n".encode())

    def wait_for(number: int) -> None:
        if gate.wait_for(number):
            dist.barrier()

    class Observer(Callback):
        """Holds a step back until the parent asks for it, and writes what it took."""

        def __init__(self) -> None:
            self._step = 0
            self._start_s = 0.0

        def on_train_step_start(self, context: Any) -> None:
            if self._step == 0:
                write(f"{READY} {core_attention(context.model)}")
            self._step += 1
            wait_for(self._step)
            link.reductions.take_waited_ms()
            self._start_s = time.perf_counter()

        def on_train_step_end(self, context: Any) -> None:
            step_ms = (time.perf_counter() - self._start_s) * 1e3
            record = {
                "step": self._step,
                "loss": context.loss_dict["lm loss"].item(),
                "step_ms": step_ms,
                "waited_ms": 0.0,
                "reduced_ms": link.reductions.take_waited_ms(),
                "sent_bytes": 0,
                "num_tokens": 0,
                "plan": "stock" if args.settings is None else json.dumps(args.settings),
            }
            write(json.dumps(record))
            wait_for(self._step + 1)

    return Observer()


def main() -> None:
    """Entry point of a rank."""
    args = parse_arguments(sys.argv[1:])
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive the benchmark
    os.sched_setaffinity(0, {args.core})
    sys.argv[1:] = []

    from megatron_lancet.training.process.exit import run_rank

    torch.set_num_threads(1)
    run_rank(lambda status: _train(args, status))


if __name__ == "__main__":
    main()

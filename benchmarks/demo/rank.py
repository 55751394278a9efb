"""A rank of the short demo: Megatron's own training, on a link that takes time, in blocks of steps as the parent asks.

``python -m benchmarks.demo.rank --core 0 --records 5 [--interface NAME] [--trace 9 13] -- MEGATRON'S FLAGS``

``benchmarks.auto`` runs the same ranks, also with Transformer Engine's layers, Megatron's own messages and its overlap.

Lines that come on standard input say up to which step the rank may go, and how fast the link is. A line of JSON for
each step's times goes to the file descriptor ``--records``, after a line ``ready`` with the model's core attention.
"""

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

PR_SET_PDEATHSIG = 1


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.demo.rank", description=__doc__)
    parser.add_argument("--core", type=int, required=True, help="that this rank runs on")
    parser.add_argument("--records", type=int, required=True, help="file descriptor that gets a line for each step")
    parser.add_argument("--interface", help="whose rate is capped; without one the transport is paced")
    parser.add_argument("--trace", type=int, nargs="*", default=[], help="steps whose timelines are recorded")
    parser.add_argument("--te", action="store_true", help="Transformer Engine's Python with kernels in plain torch")
    parser.add_argument("--own-messages", action="store_true", help="stock's all-to-alls are gloo's, as for a user")
    parser.add_argument("--threads", action="store_true", help="for the streams of Megatron's own overlap")
    parser.add_argument("megatron_flags", nargs="*")
    return parser.parse_args(argv)


READY = "ready"
"""First word of a rank's first line, written when setup is done. The rest of the line is the class of the model's core
attention."""


class Gate:
    """Holds this rank back where the parent has not asked for the step yet."""

    def __init__(self, pace: Any) -> None:
        self._pace = pace
        self._until = 0

    def wait_for(self, step: int) -> bool:
        """Returns when the step, or what follows the last one, may begin; whether it had to be asked for.

        Raises:
            SystemExit: the parent is gone.
        """
        if step <= self._until:
            return False
        while step > self._until:
            line = sys.stdin.readline()
            if not line:
                raise SystemExit("error: the demo has ended before its ranks")
            order = json.loads(line)
            self._until, self._pace.rate_bps = order["until"], order["rate_bps"]
        return True


class Observer:
    """Tells the parent about each training step."""

    def __init__(
        self, run: Any, device: Any, gate: Gate, stock_trace: Any, reductions: Any, args: argparse.Namespace
    ) -> None:
        self._run = run
        self._device = device
        self._gate = gate
        self._stock_trace = stock_trace
        self._reductions = reductions
        self._trace = args.trace
        self._records = args.records
        self._is_ready = False

    def observe(self, step: Callable[[], Any], stages: Sequence[Any]) -> Any:
        """Runs a training step when the parent has asked for it, and returns when it has asked for what is next."""
        from megatron_lancet.files.records import to_plain

        number = self._run.recorder.iteration
        if not self._is_ready:
            self._write(f"{READY} {core_attention(stages)}")
            self._is_ready = True
        self._wait_for(number)
        self._reductions.take_waited_ms()
        start_s = time.perf_counter()
        result, timeline = self._traced(step) if number in self._trace else (step(), None)
        whole_ms = (time.perf_counter() - start_s) * 1e3
        record = self._run.recorder.records[-1]
        line = {
            "step": number,
            "loss": result[0]["lm loss"].item(),
            "step_ms": record.step_ms,
            "whole_ms": whole_ms,
            "waited_ms": record.comm.exposed_ms + record.comm.counts_exposed_ms,
            "reduced_ms": self._reductions.take_waited_ms(),
            "sent_bytes": record.comm.payload_bytes,
            "num_tokens": record.num_tokens,
            "plan": "stock" if self._run.setup.plan is None else str(self._run.setup.plan),
            "is_settled": self._is_settled(),
            "timeline": None if timeline is None else to_plain(timeline),
        }
        self._write(json.dumps(line))
        self._wait_for(number + 1)  # a checkpoint or an evaluation would take time from the other variant's turn
        return result

    def _is_settled(self) -> bool:
        from megatron_lancet.training.run import OverlappedRun

        return self._run.is_settled() if isinstance(self._run, OverlappedRun) else True

    def _wait_for(self, number: int) -> None:
        import torch.distributed as dist

        if self._gate.wait_for(number):
            dist.barrier()

    def _write(self, line: str) -> None:
        os.write(self._records, f"{line}\n".encode())

    def _traced(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        import torch.distributed as dist

        from megatron_lancet.training.observe.traced_steps import traced_step

        if self._run.setup.plan is None:
            return self._stock_trace.run(dist.get_rank(), step)
        result, trace = traced_step(self._run.setup, self._device, step)
        return result, trace.timeline


def core_attention(stages: Sequence[Any]) -> str:
    """Returns the class name of the core attention in a model's layers; joins several names with +."""
    attentions = (getattr(module, "core_attention", None) for stage in stages for module in stage.modules())
    return "+".join(sorted({type(found).__name__ for found in attentions if found is not None}))


def _train(args: argparse.Namespace, status: Any) -> None:
    with _device(args.te) as device, ExitStack() as stack:
        from benchmarks.demo.links.rank_link import RankLink, StockTrace
        from benchmarks.training_step.megatron_overlap import StreamThreads, ThreadedStats
        from megatron_lancet.patching import around, replaced
        from megatron_lancet.registry import features
        from megatron_lancet.training import job
        from megatron_lancet.training import run as runs
        from megatron_lancet.training.megatron import patches
        from megatron_lancet.training.run_hook import RunHook

        link, stock_trace = RankLink(args.interface), StockTrace()

        def enter(stock: Any, hook: RunHook) -> Any:
            run = stock(hook)
            observer = Observer(run, device, Gate(link.pace), stock_trace, link.reductions, args)
            if args.threads:
                hook.changes.enter_context(StreamThreads(run.stats).stand_for_streams())
            hook.changes.enter_context(patches.taken_train_step(observer.observe))  # around the run's own hooks
            return run

        stack.enter_context(link.carries_reductions())
        stack.enter_context(link.carries_ours())
        if not args.own_messages:
            stack.enter_context(link.carries_stock(stock_trace))
        if args.threads:
            stack.enter_context(replaced(runs, "CommStats", ThreadedStats))
        stack.enter_context(around(RunHook, "enter", enter))
        job.run_job(device, status, features=features())


@contextmanager
def _device(has_te: bool) -> Iterator[Any]:
    """The device of this rank, for which Megatron is set up; nothing has imported Megatron before."""
    import torch

    if has_te:
        from benchmarks import te_layers

        with te_layers.platform(has_te):
            yield torch.device("cpu")
        return
    from megatron_lancet.training.megatron.versions import check_versions
    from megatron_lancet.training.platform.detect import platform

    check_versions()
    with platform() as found:
        yield found.device


def main() -> None:
    """Entry point of a rank."""
    args = parse_arguments(sys.argv[1:])
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive the demo
    os.sched_setaffinity(0, {args.core})
    sys.argv[1:] = args.megatron_flags

    import torch

    from megatron_lancet.training.process.exit import run_rank

    torch.set_num_threads(1)
    run_rank(lambda status: _train(args, status))


if __name__ == "__main__":
    main()

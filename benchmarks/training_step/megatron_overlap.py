"""Megatron's own overlap of expert-parallel all-to-alls, on a CPU: its communication stream becomes a thread.

``--overlap-moe-expert-parallel-comm`` runs the forward pass of a micro-batch beside the backward pass of the one
before. Dispatches and combines are nodes of Megatron's schedule that run on a CUDA stream of their own, and events make
other nodes wait for them. A CPU has no streams. Here these nodes run on one thread, in the order in which they were
launched, and a node that takes the result of another one waits for it first: the order that the events impose on a GPU.
The thread waits for the link without the interpreter's lock, so that the compute of the main thread goes on.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer import TransformerConfig

from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime.comm_stats import CommStats


def schedule_micro_batches(config: TransformerConfig) -> None:
    """Switch the overlap on, in place.

    Only after the config was made: it refuses fp32. Nothing in the schedule depends on the precision, and gradients are
    compared with those of stock Megatron before anything is timed.
    """
    config.overlap_moe_expert_parallel_comm = True


class CommThread:
    """The thread that stands for Megatron's communication stream, and how long compute waits for it."""

    def __init__(self, stats: "ThreadedStats") -> None:
        self._stats = stats

    @contextmanager
    def runs_communication(self, threaded: bool = True) -> Iterator[None]:
        """Inside, communication nodes of Megatron's schedule run on the thread.

        Args:
            threaded: False runs them at once, where only memory matters.
        """
        with ExitStack() as stack:
            # It tells the allocator which streams use a tensor; a CPU has neither.
            stack.enter_context(replaced(torch.Tensor, "record_stream", lambda *_: None))
            if threaded:
                name = "megatron-communication"
                thread = stack.enter_context(ThreadPoolExecutor(1, name, self._stats.on_communication_thread))

                def run(stock: Callable[..., Any], node: Any, *inputs: Any) -> Any:
                    arrived = self._arrived(inputs)
                    if not _communicates(node):
                        return stock(node, *arrived)
                    # Our transport reports that rows were received, not that they were sent: gloo may still read them.
                    node.free_input = False
                    return thread.submit(stock, node, *arrived)

                for name in ("_forward", "_backward"):
                    stack.enter_context(around(pipeline_utils.ScheduleNode, name, run))
            else:
                stack.enter_context(around(pipeline_utils.ScheduleNode, "_forward", _at_once))
            yield

    def _arrived(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a node. A single future stands for all results of the node before."""
        match inputs:
            case (Future() as result,):
                with self._stats.main_thread_waits():
                    found = result.result()
                return found if isinstance(found, tuple) else (found,)
        return inputs


def _at_once(stock: Callable[..., Any], node: Any, *inputs: Any) -> Any:
    """Frees what a communication node has sent as Megatron does, but only when the other ranks have received it."""
    if not (_communicates(node) and node.free_input):
        return stock(node, *inputs)
    node.free_input = False
    output = stock(node, *inputs)
    dist.barrier()
    for tensor in inputs:
        if tensor is not None:
            tensor.untyped_storage().resize_(0)
    return output


def _communicates(node: Any) -> bool:
    stream = node.stream() if callable(node.stream) else node.stream
    return stream is pipeline_utils.get_comm_stream()


class ThreadedStats(CommStats):
    """Waits of the communication thread count as exposed only where the main thread waits for that thread meanwhile.

    Waits of other threads count in full: the thread of our forwards runs in place of the main thread, not beside it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._communication_thread: threading.Thread | None = None
        self._waits: deque[tuple[str, float, float]] = deque()

    def on_communication_thread(self) -> None:
        """Makes the calling thread the communication thread, in place of an earlier one."""
        self._communication_thread = threading.current_thread()

    @contextmanager
    def waiting(self, *counters: str) -> Iterator[None]:
        if threading.current_thread() is not self._communication_thread:
            with super().waiting(*counters):
                yield
            return
        start_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        self._waits.extend((counter, start_s, end_s) for counter in counters)

    @contextmanager
    def main_thread_waits(self) -> Iterator[None]:
        """Around a wait of the main thread for the other one: its waits that ended by then are counted at the end."""
        start_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        while self._waits:
            counter, began_s, ended_s = self._waits.popleft()
            self.add(counter, max(0.0, min(end_s, ended_s) - max(start_s, began_s)) * 1e3)

"""An emulation of Megatron's own overlap of expert-parallel all-to-alls: on a CPU, threads replace its two streams.

``--overlap-moe-expert-parallel-comm`` runs the forward pass of a micro-batch during the backward pass of the one
before. Megatron's schedule is a list of nodes. It enqueues dispatches and combines on the communication stream and all
other nodes on the compute stream; events make a node wait for its inputs. The host runs ahead of both streams, so a
dispatch enqueued after the experts' backward overlaps it.

A CPU has no streams. Here one thread per stream runs its nodes in the order in which Megatron enqueues them, and a node
waits for its inputs. A GPU's streams and events impose the same order. The host waits at the end of Megatron's
schedule. The communication thread releases the interpreter's lock while it waits for the link, so the compute thread
continues.

Two things are missing. ``record_stream`` does nothing, since a CPU's allocator has no streams. The input of a
communication node is not freed, since our transport reports when rows were received, not when they were sent. Neither
slows Megatron's schedule. Memory is measured in steps that free these inputs.
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
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.common.utils import TransformerLayerNode
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.transformer import TransformerConfig

from megatron_lancet.patching import around, replaced
from megatron_lancet.runtime.comm_stats import CommStats


def schedule_micro_batches(config: TransformerConfig) -> None:
    """Switch the overlap on, in place.

    Only after the config was made: it refuses fp32. Nothing in the schedule depends on the precision, and gradients are
    compared with stock Megatron's before anything is timed.
    """
    config.overlap_moe_expert_parallel_comm = True


class StreamThreads:
    """Threads that replace Megatron's streams; measures how long compute waits for communication."""

    def __init__(self, stats: "ThreadedStats") -> None:
        self._stats = stats
        self._compute: ThreadPoolExecutor | None = None
        self._communication: ThreadPoolExecutor | None = None
        self._enqueued: list[Future[Any]] = []

    @contextmanager
    def stand_for_streams(self, threaded: bool = True) -> Iterator[None]:
        """Runs the nodes of Megatron's schedule on the threads.

        Args:
            threaded: False runs them at once, where only memory matters.
        """
        with ExitStack() as stack:
            stack.enter_context(replaced(torch.Tensor, "record_stream", lambda *_: None))
            if threaded:
                stack.enter_context(around(TransformerModelChunkSchedulePlan, "run", self._run_plan))
                for name in ("_forward", "_backward"):
                    stack.enter_context(around(pipeline_utils.ScheduleNode, name, self._enqueue_node))
                stack.enter_context(around(TransformerLayerNode, "backward_dw", self._enqueue_weight_grads))
            else:
                stack.enter_context(around(pipeline_utils.ScheduleNode, "_forward", _at_once))
            yield

    def _run_plan(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Enqueues all nodes, then waits for them. Raises the error of the first failed node."""
        with (
            ThreadPoolExecutor(1, "megatron-compute") as compute,
            ThreadPoolExecutor(1, "megatron-communication", self._stats.on_communication_thread) as communication,
        ):
            self._compute, self._communication, self._enqueued = compute, communication, []
            try:
                output = stock(*args, **kwargs)
                for one in self._enqueued:
                    one.result()
            finally:
                self._compute = self._communication = None
                self._enqueued = []
        return output.result() if isinstance(output, Future) else output

    def _enqueue_node(self, stock: Callable[..., Any], node: Any, *inputs: Any) -> Any:
        if self._compute is None or self._communication is None:  # Megatron's loss is not part of a plan
            return stock(node, *inputs)
        if _communicates(node):
            node.free_input = False
            return self._enqueue(self._communication, lambda: stock(node, *_results(inputs)))
        return self._enqueue(self._compute, lambda: stock(node, *self._arrived(inputs)))

    def _enqueue_weight_grads(self, stock: Callable[..., Any], node: Any) -> None:
        if self._compute is None:
            stock(node)
        else:
            self._enqueue(self._compute, lambda: stock(node))

    def _enqueue(self, thread: ThreadPoolExecutor, run: Callable[[], Any]) -> Future[Any]:
        enqueued = thread.submit(run)
        self._enqueued.append(enqueued)
        return enqueued

    def _arrived(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Waits for the inputs of a compute node and returns them."""
        if _has_results(inputs):
            return _results(inputs)
        with self._stats.compute_waits():
            return _results(inputs)


def _has_results(inputs: tuple[Any, ...]) -> bool:
    return all(one.done() for one in inputs if isinstance(one, Future))


def _results(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the inputs of a node. A single future holds all results of the previous node."""
    match inputs:
        case (Future() as result,):
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
    """Counts waits of the communication thread as exposed only while compute waits for that thread.

    Waits of other threads count in full: the thread of our forwards runs in place of the main thread, not next to it.
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
    def compute_waits(self) -> Iterator[None]:
        """Wraps a wait for the communication thread; counts the thread's finished waits at the end."""
        start_s = time.perf_counter()
        yield
        end_s = time.perf_counter()
        while self._waits:
            counter, began_s, ended_s = self._waits.popleft()
            self.add(counter, max(0.0, min(end_s, ended_s) - max(start_s, began_s)) * 1e3)

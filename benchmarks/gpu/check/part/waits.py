"""Counts the host's waits for the device, and says how many a plan should have.

torch reports waits inside of operators by its sync debug mode: reads of values, copies that are not asynchronous, and
``Stream.synchronize``. By torch's sources (``c10/cuda``) the mode sees neither ``Event.synchronize`` nor
``torch.cuda.synchronize``, so both are wrapped here. Neither sees the driver's own waits, for example for memory.
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megatron_lancet.patching import around, replaced
from megatron_lancet.schedule.dispatch import PLAIN
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu

_WARNING = "called a synchronizing CUDA operation"
_NO_GRAPH_TASK = -1
_NUM_SITES = 8
_WRAPPERS = (
    "megatron_lancet/patching.py",
    "part/waits.py",
    "warnings.py",
    "virtual_gpu/device.py",
    "virtual_gpu/transfers.py",
    "virtual_gpu/streams.py",
    "_dynamo/eval_frame.py",
    "torch/_compile.py",
    "utils/_python_dispatch.py",
)
"""Ends of the paths of files whose frames are no place of the program."""


class HostWaits:
    """Waits of the host, by the place in the program.

    Attributes:
        sites: ``file.py:line function`` and how often the host waited there.
        num_in_backward: explicit waits on a thread on which autograd runs a backward pass.
    """

    def __init__(self) -> None:
        self.sites: Counter[str] = Counter()
        self.num_in_backward = 0
        self._thread = threading.local()

    @property
    def number(self) -> int:
        """All of them."""
        return self.sites.total()

    def most_frequent(self) -> dict[str, int]:
        """The places with most waits."""
        return dict(self.sites.most_common(_NUM_SITES))

    def _explicit(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function that waits."""
        self._add(_site(sys._getframe(1)))
        self.num_in_backward += torch._C._current_graph_task_id() != _NO_GRAPH_TASK
        self._thread.is_explicit = True
        try:
            return stock(*args, **kwargs)
        finally:
            self._thread.is_explicit = False

    def _warned(self, message: Any, *_: Any) -> None:
        # A wait that is counted already must not be counted again, should a later torch warn of it.
        if _WARNING in str(message) and not getattr(self._thread, "is_explicit", False):
            self._add(_site(sys._getframe(1)))

    def _add(self, site: str) -> None:
        self.sites[site] += 1


@contextmanager
def counted_waits() -> Iterator[HostWaits]:
    """Counts the host's waits inside the context, on all threads."""
    found = HostWaits()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(replaced(warnings, "showwarning", found._warned))
        stack.enter_context(around(torch.cuda.Event, "synchronize", found._explicit))
        stack.enter_context(around(torch.cuda, "synchronize", found._explicit))
        torch.cuda.set_sync_debug_mode("warn")
        stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield found


@contextmanager
def sync_debug_mode_of(gpu: VirtualGpu) -> Iterator[None]:
    """Inside the context the virtual GPU has torch's sync debug mode, and warns of the waits of which torch does."""
    mode = {"": "default"}

    def wait(stock: Callable[..., None], self: VirtualGpu, stream: int, reason: str) -> None:
        stock(self, stream, reason)
        if mode[""] == "warn":
            warnings.warn(_WARNING, stacklevel=2)

    with (
        around(VirtualGpu, "host_waits_for_stream", wait),
        replaced(torch.cuda, "set_sync_debug_mode", lambda value: mode.update({"": value})),
    ):
        yield


def expected_waits(
    plan: Plan, has_experts: Sequence[bool], num_micro_batches: int, drops: bool = False, pads: bool = False
) -> int:
    """Waits of a step: for each chunk of a layer one for token counts, and one more for the rank's own where needed.

    Args:
        has_experts: of each layer.
        drops: whether routers drop tokens over a capacity.
        pads: whether routers also pad to the capacity, so that an unchunked micro-batch needs no counts.
    """
    at_ends = min(2, num_micro_batches) if plan.is_paired else 0
    number = 0
    for part, times in ((plan.at_ends, at_ends), (plan.in_middle, num_micro_batches - at_ends)):
        for layer, has in enumerate(has_experts, start=1):
            segment = part.segment_of(layer)
            if not has or (pads and segment.num_chunks == 1):
                continue
            needs_own = bool(segment.tiles) or (drops and part.dispatch is PLAIN)
            number += times * segment.num_chunks * (1 + needs_own)
    return number


def _site(frame: FrameType | None) -> str:
    """The program's own place that waits: outside of what wraps functions or stands in for a device."""
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"

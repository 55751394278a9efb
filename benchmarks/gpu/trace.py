"""Reads off a profiler trace how long messages were on the wire, and how long no kernel of the model ran meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.intervals import Span, length, uncovered

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on the device, in the traces that torch.profiler exports."""
_MESSAGE = "paced_copy_kernel"
"""Part of the name of the kernel that is a mocked message (``megatron_lancet/testkit/mock/paced_kernel.py``)."""
_US_PER_MS = 1e3


@dataclass(frozen=True)
class Communication:
    """Communication of one step.

    Attributes:
        wire_ms: time for which at least one message was on its way.
        exposed_ms: part of it during which no kernel of the model ran.
        idle_ms: time from the first piece of work to the last for which the device had neither: it waited for the host.
    """

    wire_ms: float
    exposed_ms: float
    idle_ms: float


def communication_of(trace: Mapping[str, Any]) -> Communication:
    """Splits the device's work into messages and compute.

    A message is one or more kernels of the mocked link. Their stream may be one of messages, or the one that computes,
    where stock's synchronous collectives are. A kernel that waits for the link counts as on its way.

    Args:
        trace: of one step, as exported by ``torch.profiler``; times in microseconds.

    Raises:
        ValueError: there is no message in it.
    """
    messages: list[Span] = []
    compute: list[Span] = []
    streams = set()
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK:
            span = event["ts"], event["ts"] + event["dur"]
            (messages if _MESSAGE in event["name"] else compute).append(span)
            streams.add(event["args"]["stream"])
    if not messages:
        raise ValueError(
            f"the trace has {len(compute)} pieces of work on {len(streams)} streams, but no {_MESSAGE}: no message of "
            "a mocked link was recorded. Was the link free?"
        )
    work = [*messages, *compute]
    whole = (min(start for start, _ in work), max(end for _, end in work))
    return Communication(
        wire_ms=length(messages) / _US_PER_MS,
        exposed_ms=uncovered(messages, compute) / _US_PER_MS,
        idle_ms=uncovered([whole], work) / _US_PER_MS,
    )

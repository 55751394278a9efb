"""The mocked link of a virtual GPU: messages are kernels on the streams on which they would run on a device.

Without it the virtual GPU has NCCL's streams in the place of the mocked group's (``collectives.py``).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from megatron_lancet.patching import replaced
from megatron_lancet.testkit.mock import paced_link
from megatron_lancet.testkit.mock.mock_group import MockProcessGroup
from megatron_lancet.testkit.mock.pace import LAST_END, LAST_START, START, Pace, Words

if TYPE_CHECKING:
    from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu

KERNEL = "paced_copy_kernel"
"""Name of the kernel in Triton, in traces and in the virtual GPU's log."""
_NAMESPACE = "megatron_lancet_virtual_gpu"


@contextmanager
def virtual_link(gpu: "VirtualGpu") -> Iterator[None]:
    """Inside the context a message of a mocked group is what it is on a device, with an operator for Triton's kernel.

    The operator reads the source and writes the target and the words of its stream, so a late stream delivers late, and
    two streams with the same words are a race. Nothing takes time. The words give the times of a link whose messages
    start as soon as the one before is over, from 0 on.

    Args:
        gpu: the virtual GPU whose context is open.
    """
    library = torch.library.Library(_NAMESPACE, "DEF")
    library.define(
        f"{KERNEL}(Tensor(a!) target, Tensor source, Tensor(b!) state, int start_ns, int claimed_ns, bool is_last)"
        " -> ()"
    )
    library.impl(KERNEL, _copy, "CPU")
    library.impl(KERNEL, _nothing, "Meta")
    operator = getattr(getattr(torch.ops, _NAMESPACE), KERNEL)
    starts: dict[int, int] = {}  # by the address of the link's word

    def launch(target: torch.Tensor, source: torch.Tensor, pace: Pace, words: Words, num_sms: int) -> None:
        start_ns = starts.setdefault(words.free_at.data_ptr(), 0)
        if pace.is_last:
            starts[words.free_at.data_ptr()] = start_ns + pace.claimed_ns
        operator(target, source, words.state, start_ns, pace.claimed_ns, pace.is_last)

    try:
        with ExitStack() as stack:
            stack.enter_context(replaced(MockProcessGroup, "_issue", MockProcessGroup._issue_on_link))
            stack.enter_context(replaced(paced_link, "launch", launch))
            yield
            gpu.synchronize()  # what is late needs the operator
    finally:
        library._destroy()


def _copy(
    target: torch.Tensor, source: torch.Tensor, state: torch.Tensor, start_ns: int, claimed_ns: int, is_last: bool
) -> None:
    assert state[START] in (0, start_ns), "another message is on this stream"
    target.copy_(source)
    state[START] = 0 if is_last else start_ns
    state[LAST_START], state[LAST_END] = start_ns, start_ns + claimed_ns


def _nothing(*_: object) -> None: ...

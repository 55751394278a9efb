"""A link on a device: messages that take the link's time, and SMs and memory bandwidth as NCCL's kernels do."""

import itertools
import threading
from typing import Any

import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.testkit.mock.link import Link
from megatron_lancet.testkit.mock.pace import LAST_END, LAST_START, MAX_WAIT_NS, NUM_WORDS, Pace, Words, paces_of
from megatron_lancet.testkit.mock.transfer import Transfer

NUM_SMS = 16
"""SMs of a message, where a run says nothing else."""
_SMALL_BYTES = 1 << 20
"""Parts of a message that lie side by side and have no more bytes are one kernel, as all of NCCL's are."""


class PacedLink:
    """A physical link of the GPU whose rank this process plays. All messages that get it queue, on whatever streams.

    A message is a kernel of a few blocks that copies the message's bytes and holds back each piece of 64 KB until the
    link would have carried it (``paced_kernel.py``). Its time begins when its first block runs and the link is free.
    """

    def __init__(self, link: Link, num_sms: int = NUM_SMS) -> None:
        """
        Args:
            num_sms: blocks of a message's kernel, at most, each of which takes an SM.
        """
        self.link = link
        self.num_sms = num_sms
        self._making = threading.Lock()
        self._free_at: torch.Tensor | None = None
        self._gave_up: Any = None
        self._states: dict[int, torch.Tensor] = {}

    def send(self, transfer: Transfer, bytes_to_others: float) -> None:
        """Enqueues a message on the current stream: the data is there when the stream has passed this point.

        Args:
            transfer: its tensors are on the current device.
            bytes_to_others: bytes that go over the link. Rows of this rank itself are copied along.

        Raises:
            UsageError: the message would take longer than a device waits.
            RuntimeError: an earlier message has given up.
        """
        if self.link == Link():
            transfer.deliver()
            return
        self.check()
        copies, staged = _dense(transfer)
        copies = _joined([pair for pair in copies if pair[0].numel()] or copies[:1])
        duration_us = self.link.time_us(bytes_to_others) - self.link.latency_us
        paces = paces_of(self.link.latency_us, duration_us, [target.numel() for target, _ in copies])
        if paces[0].claimed_ns > MAX_WAIT_NS:
            raise UsageError(
                f"a message of {bytes_to_others:.3g} bytes takes {paces[0].claimed_ns * 1e-9:.3g} s on a mocked link "
                f"of {self.link}, and a GPU waits {MAX_WAIT_NS * 1e-9:g} s at most. Use a faster link."
            )
        words = self._words(copies[0][0].device)
        for (target, source), pace in zip(copies, paces, strict=True):
            launch(target, source, pace, words, self.num_sms)
        for target, dense in staged:
            target.data.copy_(dense)
        transfer.reduce()

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a message that has run did not start or would not have ended in time.
        """
        if self._gave_up is not None and self._gave_up[1][0]:
            raise RuntimeError(
                f"a message of a mocked link of {self.link} gave up on the GPU after {MAX_WAIT_NS * 1e-9:g} s of "
                "waiting for the link. Times and data from there on mean nothing. Use a faster link, or smaller "
                "messages."
            )

    def last_times_ns(self) -> tuple[int, int]:
        """Start and end of the last message on the current stream, by the device's clock; the host waits for it."""
        start, end = self._states[torch.cuda.current_stream().cuda_stream][LAST_START : LAST_END + 1].tolist()
        return start, end

    def _words(self, device: torch.device) -> Words:
        with self._making:
            if self._free_at is None:
                pinned = torch.zeros(1, dtype=torch.int64, pin_memory=True)
                self._gave_up = pinned, pinned.numpy()
                self._free_at = torch.zeros(1, dtype=torch.int64, device=device)
                torch.cuda.current_stream().synchronize()  # the first message of another stream must see the zero
            stream = torch.cuda.current_stream().cuda_stream
            if stream not in self._states:
                self._states[stream] = torch.zeros(NUM_WORDS, dtype=torch.int64, device=device)
            return Words(self._free_at, self._states[stream], self._gave_up[0])


def launch(target: torch.Tensor, source: torch.Tensor, pace: Pace, words: Words, num_sms: int) -> None:
    """Enqueues a paced copy [bytes] uint8 on the current stream; the virtual GPU has a kernel of its own in place.

    Raises:
        UsageError: Triton is missing.
    """
    try:
        from megatron_lancet.testkit.mock import paced_kernel
    except ImportError as error:
        raise UsageError(f"a mocked link on a GPU needs Triton ({error}): install it, or use a free link.") from None
    paced_kernel.launch(target, source, pace, words, num_sms)


type _Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def _dense(transfer: Transfer) -> tuple[_Pairs, _Pairs]:
    """The bytes to copy, dense; and the tensors that are filled from dense ones behind the message, with these."""
    copies: _Pairs = []
    staged: _Pairs = []
    for target, source in (*transfer.copies, *((tensor, tensor) for tensor in transfer.in_place)):
        if target.is_contiguous():
            received = target.data
        else:
            received = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            staged.append((target, received))
        # Contiguous rows are sent as they are, others are packed first.
        sent = source.data.to(target.dtype).contiguous()
        copies.append((_as_bytes(received), _as_bytes(sent)))
    return copies, staged


def _joined(copies: _Pairs) -> _Pairs:
    """One copy in place of several small ones, if their targets are the parts of one, as in an all-gather."""
    targets, sources = ([*tensors] for tensors in zip(*copies, strict=True))
    are_neighbours = all(
        one.data_ptr() + one.numel() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in itertools.pairwise(targets)
    )
    num_bytes = sum(target.numel() for target in targets)
    if len(copies) == 1 or not are_neighbours or num_bytes > _SMALL_BYTES:
        return copies
    return [(targets[0].as_strided((num_bytes,), (1,)), torch.cat(sources))]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)

"""The kernel of a paced link, in Triton: it copies a message's bytes no faster than the link would, on a few SMs.

The first block of a message that gets an SM claims the link: the message starts at once, or when the link is free. So a
message that waits for SMs starts late. Each block copies every C-th piece: it loads the piece, waits until the piece is
due by the device's clock, and stores it. The last block leaves the words as they were, so no launch has to reset them.

Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from megatron_lancet.testkit.mock import pace
from megatron_lancet.testkit.mock.pace import MAX_SPINS, MAX_WAIT_NS, Pace, Words

NUM_WARPS = 16
"""512 threads, as many as a block of NCCL has."""
UNITS = (8, 4, 2, 1)
_TILE_UNITS = tl.constexpr(8192)
_PIECE_BYTES = tl.constexpr(pace.PIECE_BYTES)
_START = tl.constexpr(pace.START)
_ARRIVED = tl.constexpr(pace.ARRIVED)
_FINISHED = tl.constexpr(pace.FINISHED)
_LAST_START = tl.constexpr(pace.LAST_START)
_LAST_END = tl.constexpr(pace.LAST_END)
_NUMBERS = ("num_bytes", "claimed_ns", "offset_ns", "share_ns", "is_last", "max_wait_ns", "max_spins")
"""Arguments whose values make no kernels of their own."""


def launch(
    target: torch.Tensor,
    source: torch.Tensor,
    pace: Pace,
    words: Words,
    num_blocks: int,
    max_wait_ns: int = MAX_WAIT_NS,
    max_spins: int = MAX_SPINS,
) -> None:
    """Enqueues a paced copy on the current stream.

    Args:
        target, source: [bytes] uint8, dense; they may be the same memory.
        num_blocks: SMs that the copy takes, at most; a copy of fewer pieces takes one for each.
        max_wait_ns: a message of which more time is left when a block begins is given up: its pieces are not held.
        max_spins: how often a block looks whether the message has started.
    """
    num_bytes = target.numel()
    address = target.data_ptr() | source.data_ptr()
    num_pieces = max(triton.cdiv(num_bytes, _PIECE_BYTES.value), 1)
    paced_copy_kernel[(min(num_blocks, num_pieces),)](
        target,
        source,
        num_bytes,
        *words,
        pace.claimed_ns,
        pace.offset_ns,
        pace.share_ns,
        int(pace.is_last),
        max_wait_ns,
        max_spins,
        UNIT=next(unit for unit in UNITS if address % unit == 0),
        num_warps=NUM_WARPS,
    )


@triton.jit
def _now():  # type: ignore[no-untyped-def]
    return globaltimer()


@triton.jit
def _hold(due):  # type: ignore[no-untyped-def]
    """Waits until the clock has reached ``due``. Each thread looks at the clock itself, so nothing else is in here."""
    now = _now()
    while now < due:
        now = _now()


@triton.jit
def _unit_pointer(pointer, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to bytes as one to units."""
    if UNIT == 8:
        units = pointer.to(tl.pointer_type(tl.int64))
    elif UNIT == 4:
        units = pointer.to(tl.pointer_type(tl.int32))
    elif UNIT == 2:
        units = pointer.to(tl.pointer_type(tl.int16))
    else:
        units = pointer
    return units


@triton.jit
def _start_of_the_message(  # type: ignore[no-untyped-def]
    state, free_at, gave_up, claimed_ns, max_wait_ns, max_spins
):
    """The time at which the message starts: claimed by the first block of it that runs, seen by the others."""
    ticket = tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel", scope="gpu")
    start = tl.atomic_add(state + _START, 0, sem="acquire", scope="gpu")
    if (ticket == 0) & (start == 0):
        # Two messages that claim at a time: each addition returns the end of the one before, whichever came first.
        tl.atomic_max(free_at, _now(), sem="relaxed", scope="gpu")
        start = tl.atomic_add(free_at, claimed_ns, sem="relaxed", scope="gpu")
        tl.store(state + _LAST_START, start)
        tl.atomic_xchg(state + _START, start, sem="release", scope="gpu")
    # Bounded by looks and not by the clock, which is another one in each thread: the threads must leave together.
    spins = 0
    while (start == 0) & (spins < max_spins):
        start = tl.atomic_add(state + _START, 0, sem="acquire", scope="gpu")
        spins += 1
    now = _now()
    is_lost = (start == 0) | (start + claimed_ns - now > max_wait_ns)
    tl.store(gave_up, 1, mask=is_lost)
    return tl.where(is_lost, now - claimed_ns, start)


@triton.jit
def _copy_tile(target, source, at, num_bytes, due, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads up to 8192 units from byte ``at`` on, waits until they are due, and stores them."""
    units = tl.arange(0, _TILE_UNITS)
    targets = _unit_pointer(target + at, UNIT) + units
    sources = _unit_pointer(source + at, UNIT) + units
    if at + _TILE_UNITS * UNIT <= num_bytes:  # without a mask, so that a thread moves 16 bytes at a time
        values = tl.load(sources)
        _hold(due)
        tl.store(targets, values)
    else:
        is_there = units < (num_bytes - at) // UNIT
        values = tl.load(sources, mask=is_there)
        end = num_bytes - num_bytes % UNIT
        rest = tl.arange(0, 8)
        is_rest = rest < num_bytes % UNIT
        last = tl.load(source + end + rest, mask=is_rest)
        _hold(due)
        tl.store(targets, values, mask=is_there)
        tl.store(target + end + rest, last, mask=is_rest)


@triton.jit(do_not_specialize=_NUMBERS)
def paced_copy_kernel(  # type: ignore[no-untyped-def]
    target,
    source,
    num_bytes: tl.int64,
    free_at,
    state,
    gave_up,
    claimed_ns: tl.int64,
    offset_ns: tl.int64,
    share_ns: tl.int64,
    is_last: tl.int32,
    max_wait_ns: tl.int64,
    max_spins: tl.int32,
    UNIT: tl.constexpr,
):
    """One block: every C-th piece of a copy, each of which it holds until the piece is due."""
    start = _start_of_the_message(state, free_at, gave_up, claimed_ns, max_wait_ns, max_spins)
    num_pieces = tl.maximum((num_bytes + _PIECE_BYTES - 1) // _PIECE_BYTES, 1)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        due = start + offset_ns + share_ns * (piece + 1) // num_pieces
        for tile in range(_PIECE_BYTES // (_TILE_UNITS * UNIT)):
            at = piece * _PIECE_BYTES + tile * (_TILE_UNITS * UNIT)
            if at < num_bytes:
                _copy_tile(target, source, at, num_bytes, due, UNIT)
        _hold(due)  # of an empty message
    tl.debug_barrier()  # all threads have stored
    done = tl.atomic_add(state + _FINISHED, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(state + _ARRIVED, 0)
        tl.store(state + _FINISHED, 0)
        tl.store(state + _LAST_END, _now())
        if is_last != 0:
            tl.store(state + _START, 0)

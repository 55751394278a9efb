"""The kernel of a paced link under Triton's interpreter, with a clock of the test's own."""

from types import ModuleType

import pytest
import torch

from megatron_lancet.testkit.mock.pace import (
    ARRIVED,
    FINISHED,
    LAST_END,
    LAST_START,
    NUM_WORDS,
    PIECE_BYTES,
    START,
    Pace,
    Words,
    paces_of,
)
from tests.triton_kernels import loaded_kernels

NOW_NS, TICK_NS = 1_000_000, 7
LATENCY_US, DURATION_US = 2, 5


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return loaded_kernels(interpreted=True)


class FakeClock:
    """A clock that goes on by a tick with each look. Each block has its own: the interpreter runs them in turn.

    Attributes:
        looks: block, time, and what ``seen`` gave at each look.
    """

    def __init__(self, tl, seen=lambda: None):
        self._tl, self._seen = tl, seen
        self._times = {}
        self.looks = []

    def __call__(self):
        block = int(self._tl.program_id(0).handle.data[0])
        now = self._times[block] = self._times.get(block, NOW_NS) + TICK_NS
        self.looks.append((block, now, self._seen()))
        return self._tl.full((), now, self._tl.int64)


def words() -> Words:
    def word(number):
        return torch.zeros(number, dtype=torch.int64)

    return Words(word(1), word(NUM_WORDS), word(1))


def of_another_stream(of: Words) -> Words:
    return of._replace(state=torch.zeros_like(of.state))


def copy(kernels, monkeypatch, sizes=(100,), on=None, blocks=3, seen=lambda: None, **limits):
    """Runs a message of copies of these sizes; the clock and the words."""
    on = on or words()
    clock = FakeClock(kernels.tl, seen)
    monkeypatch.setattr(kernels, "_now", clock)
    for size, pace in zip(sizes, paces_of(LATENCY_US, DURATION_US, sizes), strict=True):
        source = torch.arange(size).to(torch.uint8)
        target = torch.full((size,), 255, dtype=torch.uint8)
        kernels.launch(target, source, pace, on, blocks, **limits)
        assert target.equal(source)
    return clock, on


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 4097, PIECE_BYTES, 2 * PIECE_BYTES + 13])
@pytest.mark.parametrize("blocks", [1, 4])
def test_every_byte_is_copied_and_no_other(kernels, monkeypatch, num_bytes, blocks):
    monkeypatch.setattr(kernels, "_now", FakeClock(kernels.tl))
    buffer = torch.full((num_bytes + 64,), 255, dtype=torch.uint8)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    kernels.launch(buffer[16 : 16 + num_bytes], source, Pace(70, 0, 70, True), words(), blocks)
    assert buffer[16 : 16 + num_bytes].equal(source)
    assert buffer[:16].eq(255).all()
    assert buffer[16 + num_bytes :].eq(255).all()


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_bytes_of_any_type_and_address_are_copied(kernels, monkeypatch, dtype, shift):
    monkeypatch.setattr(kernels, "_now", FakeClock(kernels.tl))
    sent = torch.randint(-99, 99, (9001,)).to(dtype)
    buffer = torch.zeros(sent.nbytes + shift, dtype=torch.uint8)
    kernels.launch(buffer[shift:], sent.view(torch.uint8), Pace(70, 0, 70, True), words(), 2)
    assert buffer[shift:].equal(sent.view(torch.uint8))


def test_a_tensor_may_be_copied_onto_itself(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_now", FakeClock(kernels.tl))
    tensor = torch.arange(PIECE_BYTES + 3).to(torch.uint8)
    before = tensor.clone()
    kernels.launch(tensor, tensor, Pace(70, 0, 70, True), words(), 2)
    assert tensor.equal(before)


@pytest.mark.parametrize("blocks", [1, 3])
def test_each_piece_is_there_when_it_is_due_and_not_before(kernels, monkeypatch, blocks):
    num_pieces, share_ns, latency_ns = 5, 1000, 300
    source = torch.arange(num_pieces * PIECE_BYTES - 77).to(torch.uint8)
    target = torch.full_like(source, 255)
    source[target == source] = 1
    last_bytes = torch.tensor([min((i + 1) * PIECE_BYTES, len(source)) - 1 for i in range(num_pieces)])

    def arrived():
        return target[last_bytes].ne(255).tolist()

    clock = FakeClock(kernels.tl, arrived)
    monkeypatch.setattr(kernels, "_now", clock)
    on = words()
    kernels.launch(target, source, Pace(latency_ns + share_ns, latency_ns, share_ns, True), on, blocks)
    assert target.equal(source)
    start = int(on.state[LAST_START])
    due = [start + latency_ns + share_ns * (i + 1) // num_pieces for i in range(num_pieces)]
    for piece in range(num_pieces):
        # The block that has the piece looks at the clock until the piece is due; its next look finds the piece there.
        times = [(now, there[piece]) for block, now, there in clock.looks if block == piece % blocks]
        before = [now for now, is_there in times if not is_there]
        after = [now for now, is_there in times if is_there]
        assert due[piece] <= max(before) < due[piece] + TICK_NS
        assert min(after) > max(before)


def test_a_message_ends_after_latency_and_duration(kernels, monkeypatch):
    clock, on = copy(kernels, monkeypatch, [3 * PIECE_BYTES])
    took_ns = on.state[LAST_END] - on.state[LAST_START]
    claimed_ns = (LATENCY_US + DURATION_US) * 1000
    assert claimed_ns <= took_ns <= claimed_ns + 3 * TICK_NS
    assert int(on.free_at) == on.state[LAST_START] + claimed_ns
    assert int(on.state[LAST_START]) == clock.looks[0][1], "the link was free"
    assert int(on.gave_up) == 0


def test_an_empty_message_takes_the_latency(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_now", FakeClock(kernels.tl))
    on, empty = words(), torch.empty(0, dtype=torch.uint8)
    (pace,) = paces_of(LATENCY_US, 0, [0])
    kernels.launch(empty, empty, pace, on, 16)
    assert 2000 <= on.state[LAST_END] - on.state[LAST_START] <= 2000 + 2 * TICK_NS


def test_words_are_reset_by_the_message_that_used_them(kernels, monkeypatch):
    on = words()
    for _ in range(3):
        copy(kernels, monkeypatch, [2 * PIECE_BYTES, 5], on)
        assert on.state[[START, ARRIVED, FINISHED]].tolist() == [0, 0, 0]


def test_messages_of_two_streams_queue_for_the_link(kernels, monkeypatch):
    """Both clocks begin at the same time; the second message begins where the first one ends."""
    _, first = copy(kernels, monkeypatch)
    _, second = copy(kernels, monkeypatch, on=of_another_stream(first))
    end_of_first = first.state[LAST_START] + (LATENCY_US + DURATION_US) * 1000
    assert second.state[LAST_START] == end_of_first
    assert second.free_at == end_of_first + (LATENCY_US + DURATION_US) * 1000
    assert second.state[LAST_END] >= second.free_at


def test_messages_of_two_links_do_not_queue(kernels, monkeypatch):
    _, first = copy(kernels, monkeypatch)
    _, second = copy(kernels, monkeypatch)
    assert first.state[LAST_START] == second.state[LAST_START]


def test_copies_of_a_message_share_its_time(kernels, monkeypatch):
    """They claim the link once; each is over when its share is."""
    sizes = [PIECE_BYTES, 2 * PIECE_BYTES, PIECE_BYTES]
    on = words()
    clock = FakeClock(kernels.tl)
    monkeypatch.setattr(kernels, "_now", clock)
    starts, ends = [], []
    for size, pace in zip(sizes, paces_of(LATENCY_US, DURATION_US, sizes), strict=True):
        tensor = torch.zeros(size, dtype=torch.uint8)
        kernels.launch(tensor, tensor, pace, on, 1)
        ends.append(int(on.state[LAST_END]))
        starts.append(int(on.state[LAST_START]))
    expected = [1000 * (LATENCY_US + DURATION_US * share) for share in (1 / 4, 3 / 4, 1)]
    for end, due in zip(ends, expected, strict=True):
        assert due <= end - starts[0] <= due + 3 * TICK_NS
    assert len(set(starts)) == 1
    assert int(on.free_at) - starts[0] == 1000 * (LATENCY_US + DURATION_US)


def test_a_block_that_waits_too_long_gives_up_and_says_so(kernels, monkeypatch):
    on = words()
    on.free_at[:] = NOW_NS + 10**9
    clock, _ = copy(kernels, monkeypatch, on=on, max_wait_ns=10**8)
    assert int(on.gave_up) == 1
    assert len(clock.looks) < 10, "nothing was held"
    on = words()
    on.state[ARRIVED] = 1  # a block has come and has not told when the message starts
    clock, _ = copy(kernels, monkeypatch, on=on, max_spins=3)
    assert int(on.gave_up) == 1


MUTANTS = {
    "nothing is held": ("        _hold(due)\n", ""),
    "each message has a link of its own": ("tl.atomic_add(free_at, claimed_ns", "tl.atomic_add(free_at, 0"),
    "a message does not wait for the one before": (
        "        start = tl.atomic_add(free_at",
        "        start = _now() + 0 * tl.atomic_add(free_at",
    ),
    "the state stays as it was": ("        tl.store(state + _ARRIVED, 0)\n", ""),
    "every copy of a message claims the link": ("if (ticket == 0) & (start == 0)", "if ticket == 0"),
    "the rest of a tensor is left out": ("tl.store(target + end + rest, last, mask=is_rest)", "pass"),
}
FINDS = {
    "nothing is held": lambda *args: test_each_piece_is_there_when_it_is_due_and_not_before(*args, 1),
    "each message has a link of its own": test_messages_of_two_streams_queue_for_the_link,
    "a message does not wait for the one before": test_messages_of_two_streams_queue_for_the_link,
    "the state stays as it was": test_words_are_reset_by_the_message_that_used_them,
    "every copy of a message claims the link": test_copies_of_a_message_share_its_time,
    "the rest of a tensor is left out": lambda *args: test_every_byte_is_copied_and_no_other(*args, 7, 1),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_kernel_are_found(mutant, tmp_path, monkeypatch):
    changed = loaded_kernels(interpreted=True, change=MUTANTS[mutant], folder=tmp_path)
    with pytest.raises((AssertionError, ValueError)):
        FINDS[mutant](changed, monkeypatch)


@pytest.mark.parametrize("sizes", [[0], [1], [10, 20, 30], [0, 7, 0]])
def test_paces_follow_one_another(sizes):
    paces = paces_of(LATENCY_US, DURATION_US, sizes)
    ends = [pace.offset_ns + pace.share_ns for pace in paces]
    assert paces[0].offset_ns == LATENCY_US * 1000
    assert ends[-1] == (LATENCY_US + DURATION_US) * 1000
    assert ends[:-1] == [pace.offset_ns for pace in paces[1:]]
    assert [pace.is_last for pace in paces] == [False] * (len(sizes) - 1) + [True]
    assert {pace.claimed_ns for pace in paces} == {ends[-1]}

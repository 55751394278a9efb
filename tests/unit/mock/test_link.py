"""The time that a message takes, and what the flag accepts."""

import pytest

from megatron_lancet.testkit.mock.link import Link, Queue


def test_link_time_is_latency_plus_bytes_over_bandwidth():
    assert Link(latency_us=20, gbytes_per_s=25).time_us(50_000_000) == pytest.approx(20 + 2000)
    assert Link().time_us(1 << 40) == 0


def test_link_is_parsed_from_text():
    assert Link.parse("20:12.5") == Link(20.0, 12.5)
    assert Link.parse("0:inf") == Link()
    assert str(Link.parse("20:12.5")) == "20 us, 12.5 GB/s"


@pytest.mark.parametrize(
    "text", ["", "20", "20:", ":25", "20:0", "-1:25", "20:-25", "nan:25", "20:nan", "a:b", "1:2:3"]
)
def test_link_parsing_refuses_other_text(text):
    with pytest.raises(ValueError, match="expected LATENCY_US:GBYTES_PER_S"):
        Link.parse(text)


def test_link_sends_messages_one_after_the_other():
    queue = Queue()
    first = queue.enter(7e6)
    assert queue.enter(5e6) == pytest.approx(first + 5)
    assert Queue().enter(0) < first

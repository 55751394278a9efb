"""The parts of the check on a GPU that measure the modelled link, as they are rehearsed."""

import pytest
import torch

from benchmarks.gpu.check.part import beside, link
from benchmarks.gpu.check.place import rehearsal
from benchmarks.gpu.record import Recorder, read_records
from megatron_lancet.training.platform.cpu import gpu_available


def rehearsed(part, folder):
    if gpu_available():
        pytest.skip("make test runs it on the virtual GPU, where no device is seen")
    record = Recorder(folder / "records.jsonl", limit_s=1000)
    with rehearsal() as place:
        part.run(record, place)
    assert record.num_errors == 0
    return {found["name"]: found for found in read_records(folder / "records.jsonl")}


def test_link_is_measured_for_each_size_rate_and_number_of_sms(tmp_path):
    found = rehearsed(link, tmp_path)
    sizes = [one for one in found.values() if "on_link_us" in one]
    assert len(sizes) == len(link._TINY_SIZES) * len(link.RATES) * len(link.NUM_SMS)
    for one in sizes:
        assert one["on_link_us"] == pytest.approx(one["expected_us"], abs=2e-3)  # nanoseconds, rounded
        assert one["measured_us"] == pytest.approx(2)  # two kernels between the events' numbers, at a microsecond each
    (both,) = (one for name, one in found.items() if name.startswith("two streams"))
    assert both["expected_us"] == 2 * (link.LATENCY_US + both["bytes"] / 2 / 350e3)
    assert both["launch_us"] == sizes[0]["launch_us"]
    assert both["copied_gbytes_per_s"] == found[f"highest rate of {both['blocks']} SMs"]["gbytes_per_s"]
    assert {f"highest rate of {number} SMs" for number in link.NUM_SMS} < found.keys()


def a_message(**changes):
    return {
        "bytes": 10**8,
        "expected_us": 1010.0,
        "measured_us": 1014.0,
        "launch_us": 4.0,
        "copied_gbytes_per_s": 500.0,
    } | changes


@pytest.mark.parametrize(
    ("changes", "is_error"),
    [
        ({}, False),
        ({"measured_us": 1030.0}, False),
        ({"measured_us": 1040.0}, True),
        ({"measured_us": 980.0}, True),
        ({"measured_us": 1040.0, "copied_gbytes_per_s": 110.0}, False),
        ({"bytes": 2 * 10**8, "expected_us": 2020.0, "measured_us": 2024.0}, False),
        ({"bytes": 2 * 10**8, "expected_us": 2020.0, "measured_us": 1014.0}, True),
    ],
    ids=["right", "2 %", "slow", "fast", "its SMs copy no faster", "two", "two at the same time"],
)
def test_a_message_that_misses_the_formula_is_an_error(tmp_path, changes, is_error):
    record = Recorder(tmp_path / "records.jsonl", limit_s=1000)
    link._judge(record, "a", a_message(**changes), is_judged=True)
    (found,) = read_records(tmp_path / "records.jsonl")
    assert ("error" in found) == is_error == (record.num_errors == 1)
    link._judge(record, "b", a_message(**changes), is_judged=False)
    assert "error" not in read_records(tmp_path / "records.jsonl")[1]


@pytest.mark.parametrize("has_carve_out", [True, False])
def test_products_are_measured_beside_messages(tmp_path, monkeypatch, has_carve_out):
    settings: list[int | None] = []
    library = torch.backends.cuda.preferred_blas_library()
    monkeypatch.delattr(torch._C, beside._SET_CARVE_OUT, raising=False)
    if has_carve_out:
        monkeypatch.setattr(torch._C, beside._SET_CARVE_OUT, settings.append, raising=False)
    found = rehearsed(beside, tmp_path)
    assert found["carve-out"]["is_available"] == has_carve_out
    cells = [one for one in found.values() if "beside_ms" in one]
    assert len(cells) == len(link.NUM_SMS) * 2 * (5 if has_carve_out else 2)  # the plain product has a third way
    for one in cells:
        assert one["alone_ms"] > 0
        assert one["beside_ms"] > 0
        assert len(one["each_ms"]) == (12 if "grouped" in one["name"] else 4)
    plain = [8, None, 8, None, 16, None, 16, None, 32, None, 32, None]
    assert settings == ([*plain, 8, None, 16, None, 32, None] if has_carve_out else [])
    assert torch.backends.cuda.preferred_blas_library() == library


def test_parts_stop_when_their_time_is_over(tmp_path):
    for part in (link, beside):
        if gpu_available():
            pytest.skip("make test runs it on the virtual GPU, where no device is seen")
        record = Recorder(tmp_path / "records.jsonl", limit_s=0)
        with rehearsal() as place:
            part.run(record, place)
        assert read_records(tmp_path / "records.jsonl")[-1]["name"] == "stopped"

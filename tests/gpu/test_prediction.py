"""The committed prediction of the check on a GPU is what the code predicts."""

import json
import os
import re
from unittest import mock

import pytest
import torch

from benchmarks.gpu.check.compare import IDEAL, STOCK
from benchmarks.gpu.check.predict import DEVICES, committed, hash_of, read_prediction
from benchmarks.gpu.check.predict.__main__ import LINKS, main, not_predicted, variants, work
from benchmarks.gpu.check.predict.file import COMMAND, as_text
from benchmarks.harness.origin import PACKAGES, versions_of
from megatron_lancet.errors import UsageError
from megatron_lancet.training.platform.cpu import cpu_platform

OURS = "ours k=1"
OTHER_VERSIONS = 0.05
"""Other versions of torch and Megatron may have a few other kernels."""


@pytest.fixture(scope="module")
def steps():
    from benchmarks.gpu.check.predict.recorded import record
    from benchmarks.gpu.variants import Variant

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there is nothing to compute but small maps of tokens
    try:
        with mock.patch.dict(os.environ), cpu_platform():
            return {name: record(Variant.named(name), work()) for name in (STOCK, OURS)}
    finally:
        torch.set_num_threads(num_threads)


def flat(value, path=()):
    """Numbers by their path in a tree."""
    if not isinstance(value, dict):
        return {path: value}
    return {place: number for key, one in value.items() for place, number in flat(one, (*path, key)).items()}


def check_same(device, found, kept, tolerance=0.0):
    """Compares figures by their path: what the code predicts now with what is kept of the same variants and links."""
    differing = {
        path: (kept.get(path), number)
        for path, number in found.items()
        if number != pytest.approx(kept.get(path), rel=tolerance, abs=tolerance)
    }
    assert found.keys() == kept.keys()
    assert not differing, (
        f"{committed(device).name} is not what the code predicts: {len(differing)} figures differ, for example "
        f"{dict(list(differing.items())[:4])} (committed, now). If the change is wanted, make it again on a clean "
        f"checkout: {COMMAND} --device {device}"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_committed_prediction_is_what_the_code_makes(device, steps):
    if device != "H100":  # the memory of the H200 changes all kernels alike, so one variant is enough there
        steps = {OURS: steps[OURS]}
    found = flat(variants(device, LINKS, steps))
    file = read_prediction(committed(device))
    kept = flat({name: {link: file["variants"][name][link] for link in LINKS} for name, *_ in found})
    check_same(device, found, kept, 0 if file["made_by"]["versions"] == versions_of(PACKAGES) else OTHER_VERSIONS)


def test_one_kernel_more_is_noticed(steps):
    step = steps[OURS]
    kernel = next(entry for entry in step.log if hasattr(entry, "flops"))
    longer = type(step)((*step.log, kernel), step.messages, step.received_rows, step.weight_grads, step.facts)
    found, kept = (flat(variants("H100", LINKS[:1], {OURS: one})) for one in (longer, step))
    with pytest.raises(AssertionError, match=r"'kernels'\): \((\d+), (\d+)\).* make it again") as failure:
        check_same("H100", found, kept)
    before, now = re.search(r"'kernels'\): \((\d+), (\d+)\)", str(failure.value)).groups()
    assert int(now) == int(before) + 1


@pytest.mark.parametrize("device", DEVICES)
def test_every_variant_has_a_prediction_on_each_link_or_a_reason(device):
    from benchmarks.gpu.variants import PLANS

    file = read_prediction(committed(device))
    assert file["device"] == device
    assert set(file["variants"]) | set(file["not_predicted"]) == set(PLANS) | {IDEAL}
    assert set(file["not_predicted"]) == set(not_predicted())
    for name, by_link in file["variants"].items():
        assert list(by_link) == list(LINKS)
        for figures in by_link.values():
            assert figures["modelled"]["step_ms"] > 0
            assert ("simulated" in figures) != (name in file["not_simulated"])


def test_text_and_hash_follow_the_content(tmp_path):
    path = committed("H100")
    assert path.read_text() == as_text(read_prediction(path))
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    assert hash_of(copy) == hash_of(path)
    prediction = json.loads(copy.read_text())
    prediction["variants"][STOCK][LINKS[0]]["modelled"]["step_ms"] += 0.001
    copy.write_text(as_text(prediction))
    assert hash_of(copy) != hash_of(path)
    copy.write_bytes(b"abc")
    assert hash_of(copy) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="expected"):
        read_prediction(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--link", "10"], "--link: expected LATENCY_US"), (["--output", "/no/such/file.json"], "there is no folder")],
)
def test_command_refuses(words, message):
    with pytest.raises(UsageError, match=message):
        main(words)


def test_choices_of_experts_are_as_likely_as_planned():
    from benchmarks.gpu.check.predict.recorded import balanced_map
    from megatron_lancet.planning.distinct_rows import expected_part_of_tokens

    chosen = balanced_map(4096, 128, 8)
    assert chosen.sum(dim=0).unique().tolist() == [4096 * 8 // 128]
    assert chosen.sum(dim=1).unique().tolist() == [8]
    ranks = chosen.view(-1, 8, 16).any(dim=2).float().mean(dim=0)
    assert ranks.tolist() == pytest.approx([expected_part_of_tokens(128, 16, 8)] * 8, abs=0.02)

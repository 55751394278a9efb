"""What modules for other launchers do before there is a model, and which parts of models they refuse."""

from importlib.metadata import EntryPoint

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.library import launchers
from megatron_lancet.library.launchers import ms_swift, nemo_rl, slime
from megatron_lancet.library.models import refuse_foreign_parts
from megatron_lancet.library.overlap import Overlap
from tests.ranks.launch import REPO

PLUGIN = "megatron_lancet.library.launchers.verl"


def test_verl_finds_the_plug_in_by_its_entry_point():
    assert f'"verl.plugins": ["lancet = {PLUGIN}"]' in (REPO / "setup.py").read_text()
    assert EntryPoint("lancet", PLUGIN, "verl.plugins").load().BehindEngine


def test_launchers_say_which_variable_to_set(monkeypatch):
    monkeypatch.delenv("LANCET_FLAGS", raising=False)
    for install in (lambda: slime.install(None), nemo_rl.install):
        with pytest.raises(UsageError, match="expected the overlap's settings in LANCET_FLAGS, found none"):
            install()
    assert launchers._installed == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--lancet-no-such 1", "LANCET_FLAGS: .*--lancet-no-such"),
        ("--lancet-plan '", "LANCET_FLAGS: No closing quotation"),
    ],
)
def test_wrong_flags_are_refused_before_a_model_exists(monkeypatch, flags, said):
    monkeypatch.setenv("LANCET_FLAGS", flags)
    with pytest.raises(UsageError, match=said):
        nemo_rl.install()
    assert launchers._installed == []


def test_a_process_has_one_overlap(monkeypatch):
    monkeypatch.setenv("LANCET_FLAGS", "--lancet-num-chunks 1")
    first = launchers.install_from_environment()
    assert launchers.install_from_environment() is first
    launchers.close()
    assert launchers._installed == []
    launchers.close()


def test_ms_swift_is_missed_in_one_line():
    with pytest.raises(UsageError, match="expected ms-swift with Megatron, found none"):
        ms_swift.install()


def test_overlap_takes_both_sizes_or_none():
    with pytest.raises(UsageError, match="expected micro_batch_size and seq_length, or neither of them, found one"):
        Overlap(seq_length=16)


def test_layers_of_ms_swift_are_refused_with_what_to_switch():
    package = "mcore_bridge.model.gpt_model"
    foreign = type("Foreign", (torch.nn.Linear,), {"__module__": package})
    advice = f"found {package}.Foreign. Pass --bridge_backend megatron-bridge to ms-swift"
    with pytest.raises(UsageError, match=advice):
        refuse_foreign_parts(torch.nn.Sequential(torch.nn.Linear(1, 1), foreign(1, 1)))
    refuse_foreign_parts(torch.nn.Sequential(type("Mine", (torch.nn.Linear,), {"__module__": f"my_{package}"})(1, 1)))

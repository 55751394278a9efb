"""``--lancet-profile FILE``: steps of another size have no place in a profile."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.features.tuning import profile_to_file
from megatron_lancet.features.tuning.profile_to_file import ProfileToFile
from tests.features.tuning.fake_profile_runs import PRESENT, Run
from tests.unit.training.configs import config_with


def test_profile_of_a_batch_that_grows_is_refused(monkeypatch, tmp_path):
    sizes = iter((2, 2, 4))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(Run, "started", [])
    monkeypatch.setattr(profile_to_file, "ProfileRun", Run)
    monkeypatch.setattr(profile_to_file, "get_num_microbatches", lambda: next(sizes))
    monkeypatch.setattr(profile_to_file, "profiled_model", lambda *_: "model")
    monkeypatch.setattr(profile_to_file, "planning_limits", lambda *_: None)
    monkeypatch.setattr(profile_to_file, "plans_within", lambda *_: [PRESENT] * 4)
    config, setup = config_with(profile=tmp_path / "profile.json"), SimpleNamespace(plan=PRESENT)
    steering = ProfileToFile(SimpleNamespace(), config, setup, torch.device("cpu"))
    assert [steering.observe(lambda: "done") for _ in range(2)] == ["done", "done"]
    with pytest.raises(UsageError, match=r"found 4 micro-batches in a step after 2\. Drop --step-batch-size-schedule"):
        steering.observe(lambda: "done")

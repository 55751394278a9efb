"""Plan makers of a run with one rank."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_lancet.config import AttentionChoice
from megatron_lancet.features.tuning import plan_maker
from megatron_lancet.features.tuning.flags import CacheChoice
from megatron_lancet.features.tuning.plan_maker import ProfilingPlanMaker
from megatron_lancet.profiler.cache import ProfileKey
from tests.features.tuning.fake_profile_runs import BATCH, MACHINE, PRESENT, PROFILE, Run
from tests.unit.training.configs import config_with


@pytest.fixture
def make(monkeypatch):
    """Builds plan makers of a run with one rank. Their ``notes`` are the lines for the user."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
    monkeypatch.setattr(plan_maker, "ProfileRun", Run)
    monkeypatch.setattr(plan_maker, "least_room_bytes", lambda device: Run.room_bytes)
    monkeypatch.setattr(Run, "room_bytes", 1 << 40)
    monkeypatch.setattr(Run, "num_micro_batches", 2)
    monkeypatch.setattr(plan_maker, "get_num_microbatches", lambda: Run.num_micro_batches)
    monkeypatch.setattr(plan_maker, "profiled_model", lambda *_: "model")
    monkeypatch.setattr(plan_maker, "key_of", lambda model: ProfileKey.of(PROFILE))
    monkeypatch.setattr(Run, "started", [])
    monkeypatch.setattr(Run, "result", PROFILE)

    def build(limits=BATCH, cache_dir=None, attention=AttentionChoice.STOCK):
        monkeypatch.setattr(Run, "adds_plans", cache_dir is not None)  # as a kept profile has
        monkeypatch.setattr(plan_maker, "planning_limits", lambda args, config: limits)
        args = SimpleNamespace(
            micro_batch_size=MACHINE.micro_batch_size,
            seq_length=MACHINE.seq_length,
            context_parallel_size=1,
            overlap_grad_reduce=False,
            fp8=None,
            fp4=None,
            transformer_impl="local",
            dataloader_inter_document_masking=False,
            multi_latent_attention=False,
            window_size=None,
            softmax_type="vanilla",
        )
        notes: list[str] = []
        setup = SimpleNamespace(plan=PRESENT, stages=())
        config = config_with(cache=cache_dir or CacheChoice.OFF, attention=attention)
        maker = ProfilingPlanMaker(args, config, setup, torch.device("cpu"), notes.append)
        maker.made_for()
        maker.notes = notes
        return maker

    return build

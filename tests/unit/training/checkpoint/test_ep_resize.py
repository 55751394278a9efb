"""Which checkpoints a run with another expert-parallel size can go on from."""

from types import SimpleNamespace

import pytest
from megatron.training import checkpointing

from megatron_lancet.errors import UsageError
from megatron_lancet.features.ep_resize.feature import check_checkpoint, check_separate_expert_grads
from megatron_lancet.training.megatron.checkpoint_patches import arguments_before_loading


def run(ep_size: int, **changes: object) -> SimpleNamespace:
    standard = {
        "num_experts": 4,
        "expert_model_parallel_size": ep_size,
        "lancet_separate_expert_grads": False,
        "no_load_optim": False,
        "finetune": False,
        "use_distributed_optimizer": False,
        "dist_ckpt_optim_fully_reshardable": False,
    }
    return SimpleNamespace(**{**standard, **changes})


APART = {"lancet_separate_expert_grads": True}
CUT = {"use_distributed_optimizer": True}
RESHARDABLE = {**CUT, "dist_ckpt_optim_fully_reshardable": True}


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (run(2), run(2)),
        (run(1), run(1)),
        (run(2), run(1, **APART)),
        (run(1, **APART), run(2)),
        (run(4), run(2)),
        (run(2, **CUT), run(2, **CUT)),
        (run(2, **RESHARDABLE), run(1, **RESHARDABLE, **APART)),
        (run(2), run(1, no_load_optim=True)),
        (run(2), run(1, finetune=True)),
        (run(1), run(1, num_experts=None)),
    ],
)
def test_ep_resize_accepts_matching_checkpoints(saved, resumed):
    check_checkpoint(resumed, saved)


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (
            run(2),
            run(1),
            "saved with --expert-model-parallel-size 2, this run has 1: pass --lancet-separate-expert-grads too",
        ),
        (run(1), run(2), "it does not keep the experts' optimizer state apart"),
        (run(1), run(1, **APART), "does not keep the experts' optimizer state apart"),
        (run(1, **APART), run(1), "pass --lancet-separate-expert-grads too"),
        (run(4, **CUT), run(2, **RESHARDABLE), "Save it with --dist-ckpt-optim-fully-reshardable"),
    ],
)
def test_ep_resize_refuses_other_checkpoints(saved, resumed, message):
    with pytest.raises(UsageError, match=message):
        check_checkpoint(resumed, saved)


def test_ep_resize_accepts_checkpoint_of_stock_without_our_flags():
    saved = run(2)
    del saved.lancet_separate_expert_grads
    check_checkpoint(run(1, **APART), saved)


def test_separate_expert_grads_is_for_ep_size_one():
    check_separate_expert_grads(run(1, **APART))
    with pytest.raises(UsageError, match=r"this run has size 2\. Drop it"):
        check_separate_expert_grads(run(2, **APART))
    with pytest.raises(UsageError, match=r"this model has none\. Drop it"):
        check_separate_expert_grads(run(1, **APART, num_experts=None))


@pytest.mark.parametrize("rank0", [True, False])
def test_saved_arguments_of_any_format_are_looked_at(monkeypatch, rank0):
    """Megatron reads torch and torch_dcp with rank0=False alone."""
    saved, seen = run(2), list[SimpleNamespace]()
    monkeypatch.setattr(
        checkpointing, "_load_base_checkpoint", lambda load_dir, args, rank0: ({"args": saved}, "", False, None)
    )
    with arguments_before_loading(seen.append):
        checkpointing._load_base_checkpoint("folder", None, rank0=rank0)
    assert seen == [saved]

"""Which runs may place experts; what the others are told before they start."""

from types import SimpleNamespace

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.features.placement.flags import PlacementFlags
from megatron_lancet.features.placement.placement import check_reshardable, choose_placement, placement_note
from megatron_lancet.planning.load.placement import placement_to_json
from megatron_lancet.schedule.plan import fixed_plan
from tests.unit.training.configs import config_with

PLAN = fixed_plan(2)


def arguments(**changes: object) -> SimpleNamespace:
    standard = {
        "num_layers": 3,
        "num_experts": 4,
        "moe_layer_freq": [0, 1, 1],
        "hybrid_layer_pattern": None,
        "hybrid_override_pattern": None,
        "mtp_num_layers": None,
        "mtp_use_repeated_layer": False,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "save": None,
        "load": None,
        "pretrained_checkpoint": None,
        "ckpt_step": None,
        "ckpt_format": "torch_dist",
        "ckpt_convert_format": None,
        "no_save_optim": False,
        "no_load_optim": False,
        "finetune": False,
        "use_distributed_optimizer": False,
        "dist_ckpt_optim_fully_reshardable": False,
        "fp8_param_gather": False,
    }
    return SimpleNamespace(**{**standard, **changes})


@pytest.fixture
def placed(tmp_path):
    """Writes a placement file; returns the configuration that names it."""

    def placed(layers):
        path = tmp_path / "placement.json"
        path.write_text(placement_to_json(layers))
        return config_with(PlacementFlags(expert_placement=path))

    return placed


def test_a_run_has_megatrons_placement_unless_it_is_asked():
    assert choose_placement(arguments(expert_model_parallel_size=1), config_with(), None) is None
    assert placement_note(None) == ""


def test_a_placement_of_some_layers_is_taken_and_said(placed):
    found = choose_placement(arguments(), placed({2: (3, 1, 2, 0), 3: (0, 1, 2, 3)}), PLAN)
    assert found == {2: (3, 1, 2, 0), 3: (0, 1, 2, 3)}
    assert placement_note(found) == "; experts of 1 layer are not in Megatron's order"


def test_predictions_have_numbers_behind_the_layers(placed):
    config = placed({4: (3, 1, 2, 0)})
    assert choose_placement(arguments(mtp_num_layers=1), config, PLAN)
    with pytest.raises(UsageError, match="layer 4 has no experts in this model"):
        choose_placement(arguments(), config, PLAN)
    repeated = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    with pytest.raises(UsageError, match="layer 5 has no experts in this model, which has them in layers 2, 3, 4"):
        choose_placement(arguments(**repeated), placed({5: (3, 1, 2, 0)}), PLAN)


@pytest.mark.parametrize(
    ("changes", "plan", "message"),
    [
        ({"expert_model_parallel_size": 1}, None, "--expert-model-parallel-size is 1. Drop the flag"),
        ({}, None, "needs the overlapping block, .* Drop it, or --lancet-plan off"),
        ({"num_experts": 8}, PLAN, "layer 2 has 4 experts, this model has --num-experts 8"),
        ({"moe_layer_freq": [1, 0, 0]}, PLAN, "layer 2 has no experts in this model, which has them in layers 1"),
        ({"pretrained_checkpoint": "there", "ckpt_format": "torch"}, PLAN, "does not work with --ckpt-format torch"),
        ({"load": "there", "ckpt_convert_format": "torch"}, PLAN, "does not work with --ckpt-convert-format torch: "),
        ({"save": "there", "ckpt_format": "torch"}, PLAN, "does not work with --ckpt-format torch: .* pass torch_dist"),
        (
            {"save": "there", "use_distributed_optimizer": True},
            PLAN,
            "--use-distributed-optimizer as it is saved by default: .*pass --dist-ckpt-optim-fully-reshardable",
        ),
        ({"fp8_param_gather": True}, PLAN, "weights that are stored in fp8 or fp4"),
        ({"lancet_identity_experts": 2}, PLAN, "does not work with --lancet-identity-experts: .*; drop that flag"),
    ],
)
def test_a_run_that_can_not_place_experts_is_refused_in_one_line(placed, changes, plan, message):
    with pytest.raises(UsageError, match=message) as raised:
        choose_placement(arguments(**changes), placed({2: (3, 1, 2, 0)}), plan)
    assert "--lancet-expert-placement" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"save": "there"},
        {"save": "there", "use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True},
        {"save": "there", "use_distributed_optimizer": True, "no_save_optim": True},
        {"use_distributed_optimizer": True},
    ],
)
def test_checkpoints_without_state_by_rank_are_allowed(placed, changes):
    assert choose_placement(arguments(**changes), placed({2: (3, 1, 2, 0)}), PLAN)


def test_a_checkpoint_with_files_by_rank_is_refused(placed, tmp_path):
    (tmp_path / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    here, empty = str(tmp_path), str(tmp_path / "none")
    for changes in ({"load": here}, {"load": empty, "pretrained_checkpoint": here}):
        with pytest.raises(UsageError, match=rf"in {here}: its files are by rank; save it again with --ckpt-format"):
            choose_placement(arguments(**changes), placed({2: (3, 1, 2, 0)}), PLAN)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text('{"version": 1, "layers": {"2": [0, 0, 1, 2]}}')
    with pytest.raises(UsageError, match=r"--lancet-expert-placement .*found several times: \[0\], missing: \[3\]"):
        choose_placement(arguments(), config_with(PlacementFlags(expert_placement=path)), PLAN)


def test_optimizer_state_that_is_sharded_by_rank_is_not_loaded():
    saved = arguments(use_distributed_optimizer=True)
    with pytest.raises(UsageError, match="Save it with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"):
        check_reshardable(arguments(), saved)
    check_reshardable(arguments(no_load_optim=True), saved)
    check_reshardable(arguments(), arguments())

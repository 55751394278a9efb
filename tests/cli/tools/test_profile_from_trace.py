"""From a stock run with Megatron's own profiler flags to a plan and its prediction, on two real ranks."""

import json

import pytest

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.from_trace.profile import STOCK
from megatron_lancet.planning.profile import read_profile
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from tests.cli.loading import load_tool
from tests.ranks.pretraining import EP2, pretrain

PROFILER = (
    "--profile --use-pytorch-profiler --pytorch-profiler-collect-shapes --profile-step-start 2 --profile-step-end 4 "
    "--profile-ranks 0 1"
).split()


def main_of(name):
    return load_tool(name).main


@pytest.fixture(scope="module")
def traces(token_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    flags = [*EP2, *PROFILER, "--lancet-plan", "off", "--tensorboard-dir", folder / "tensorboard"]
    pretrain(token_data, flags, folder, train_iters=5)
    return [folder / "torch_profile" / f"rank-{rank}.json.gz" for rank in range(2)]


@pytest.mark.distributed
def test_traces_of_stock_run_become_profile_plan_and_prediction(traces, tmp_path, capsys):
    profile_file, plan_file = tmp_path / "profile.json", tmp_path / "plan.json"
    main_of("traces/profile_from_trace")([*map(str, traces), "--output", str(profile_file)])
    assert "2 layers, 4 experts (top 2) on 2 ranks, 2 micro-batches of 4 x 32 tokens" in capsys.readouterr().out
    profile = read_profile(profile_file)
    model = profile.model
    assert model.layer_kinds == (LayerKind.MOE, LayerKind.MOE)
    assert (model.row_bytes, model.combine_row_bytes, model.counts_bytes) == (64 * 4 + 16, 64 * 4, 4 * 8)
    assert sum(profile.received_share) == pytest.approx(1)
    assert all(sum(one.received) == 2 * 2 * 4 * 32 for one in profile.routing), "two experts of the tokens of two ranks"
    whole = {(op.phase, op.kind): op.ms for op in profile.ops if op.num_chunks == 1}
    in_layers = (OpKind.ATTENTION, OpKind.ROUTE, OpKind.PREPROCESS, OpKind.EXPERTS, OpKind.POSTPROCESS)
    for phase in (Phase.FORWARD, Phase.INPUT_GRAD):
        assert all(whole[phase, kind] > 0 for kind in (*in_layers, OpKind.EMBEDDING, OpKind.HEAD))
    assert {dw.name for dw in profile.weight_grads if dw.after == OpKind.ATTENTION} == {
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
    }
    # Every microsecond of a step belongs to an op, to a wait or to the rest.
    assert 0 < profile.rest_ms < profile.measured_steps_ms[STOCK]
    main_of("plans/make_plan")([str(profile_file), "--output", str(plan_file)])
    assert "without overlap" in capsys.readouterr().out
    main_of("plans/simulate_plan")([str(profile_file), str(plan_file), "--format", "json"])
    assert json.loads(capsys.readouterr().out)["step_ms"] > 0


def test_another_trace_is_refused_in_one_line(tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(UsageError, match=r"rank-0\.json: the trace has no step markers .*--use-pytorch-profiler"):
        main_of("traces/profile_from_trace")([str(path), "--output", str(tmp_path / "profile.json")])
    assert not (tmp_path / "profile.json").exists()

"""What is read from generated traces: every time that went into them comes out."""

import gzip
import json
from dataclasses import replace

import pytest

from megatron_lancet.files.reader import RecordError
from megatron_lancet.lab.from_trace.profile import STOCK, profile_from_traces
from megatron_lancet.planning.profile import profile_from_json
from megatron_lancet.planning.search.planner import make_plan
from megatron_lancet.planning.simulation.cost_model import CostModel
from megatron_lancet.planning.simulation.simulator import Simulator
from megatron_lancet.planning.stages import split_at_stages
from megatron_lancet.schedule.layers import LayerKind
from megatron_lancet.schedule.ops import OpKind, Phase
from megatron_lancet.schedule.plan import ChunkDim, fixed_plan
from tests.unit.planning.from_trace.generator import DENSE, FORWARD_US, MOE, ROWS, B, H, Recipe, S, write

TOLERANCE_MS = 0.02
"""The host's own time between ops."""


def total_ms(*kinds):
    return sum(FORWARD_US[kind] for kind in kinds) / 1e3


ATTENTION = ("norm", "linear_qkv", "baddbmm", "softmax", "bmm", "linear_proj", "add", "norm")
EXPERT = ("linear_fc1", "gelu", "linear_fc2")
FORWARD_MS = {
    OpKind.EMBEDDING: total_ms("embedding"),
    OpKind.ATTENTION: total_ms(*ATTENTION),
    OpKind.ROUTE: total_ms("router", "topk"),
    # our ops pack the rows, for one copy more
    OpKind.PREPROCESS: 2 * total_ms("permute"),
    OpKind.EXPERTS: 2 * total_ms(*EXPERT),
    OpKind.POSTPROCESS: total_ms("unpermute", "add"),
    OpKind.HEAD: total_ms("norm", "output_layer", "loss"),
}
LINEAR_MS = {
    OpKind.ATTENTION: total_ms("linear_qkv", "linear_proj"),
    OpKind.EXPERTS: 2 * total_ms("linear_fc1", "linear_fc2"),
    OpKind.HEAD: total_ms("output_layer"),
}
"""Of a backward that takes twice as long as the forward this is dW, which does not count for the op."""


def whole(profile, layer_kind=None):
    """Times of ops of unchunked micro-batches, by phase and kind."""
    return {
        (op.phase, op.kind): op.ms
        for op in profile.ops
        if op.num_chunks == 1 and (layer_kind is None or op.layer_kind is layer_kind)
    }


def expected_backward_ms(kind):
    packing_ms = total_ms("permute") if kind == OpKind.EXPERTS else 0.0
    forward_ms = total_ms("permute") if kind == OpKind.PREPROCESS else FORWARD_MS[kind]
    return 2 * forward_ms - LINEAR_MS.get(kind, 0.0) + packing_ms


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def both(request, tmp_path):
    """Profile of two ranks, of which the second launches messages later."""
    recipe = Recipe(on_gpu=request.param, micro_batches=2, layers=(DENSE, MOE, MOE))
    return profile_from_traces(write(tmp_path, recipe, replace(recipe, rank=1, late_us=500.0)))


def test_ops_have_the_times_between_their_neighbours(both):
    found = whole(both, LayerKind.MOE) | whole(both, LayerKind.NONE)
    for kind, ms in FORWARD_MS.items():
        assert found[Phase.FORWARD, kind] == pytest.approx(ms, abs=TOLERANCE_MS), kind
        assert found[Phase.INPUT_GRAD, kind] == pytest.approx(expected_backward_ms(kind), abs=TOLERANCE_MS), kind


def test_layers_without_experts_are_recognized(both):
    assert both.model.layer_kinds == (LayerKind.DENSE, LayerKind.MOE, LayerKind.MOE)
    found = whole(both, LayerKind.DENSE)
    assert found[Phase.FORWARD, OpKind.ATTENTION] == pytest.approx(total_ms(*ATTENTION[:-1]), abs=TOLERANCE_MS)
    assert found[Phase.FORWARD, OpKind.MLP] == pytest.approx(total_ms("norm", *EXPERT, "add"), abs=TOLERANCE_MS)


def test_weight_gradients_have_names_times_and_sizes(both):
    found = {(dw.layer_kind, dw.name): dw for dw in both.weight_grads if dw.num_chunks == 1}
    fc1 = found[LayerKind.MOE, "mlp.experts.local_experts.1.linear_fc1"]
    assert (fc1.after, fc1.weight_bytes) == (OpKind.EXPERTS, 4 * 16 * H)
    assert fc1.ms == pytest.approx(total_ms("linear_fc1"), abs=TOLERANCE_MS)
    assert found[LayerKind.MOE, "self_attention.linear_qkv"].ms == pytest.approx(0.3, abs=TOLERANCE_MS)
    assert {name for kind, name in found if kind is LayerKind.DENSE} == {
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    }
    assert found[LayerKind.NONE, "output_layer"].after == OpKind.HEAD


def test_facts_follow_from_shapes_and_groups(both):
    model = both.model
    assert (model.micro_batch_size, model.seq_length, model.num_micro_batches) == (B, S, 2)
    assert (model.topk, model.num_experts, model.ep_size, model.world_size) == (2, 4, 2, 2)
    assert (model.row_bytes, model.combine_row_bytes) == (4 * H + 16, 4 * H)
    assert both.received_share == (0.5, 0.5)
    assert [(one.layer, one.sent, one.received) for one in both.routing] == [
        (2, (ROWS // 2,) * 2, (ROWS,) * 2),
        (3, (ROWS // 2,) * 2, (ROWS,) * 2),
    ]


def test_messages_cost_their_time_on_the_last_rank(both):
    assert both.link.all_to_all[-1] == (ROWS // 2 * 4 * H, pytest.approx(1.0, abs=TOLERANCE_MS))
    assert both.link.all_to_all[0] == (ROWS // 2 * 4, pytest.approx(0.1, abs=TOLERANCE_MS))
    assert both.link.counts_ms == pytest.approx(0.06, abs=TOLERANCE_MS)
    is_gpu = both.device == "NVIDIA H100"
    assert (both.link.sends_share_link, both.link.host_polls) == (not is_gpu, not is_gpu)
    assert both.link.compute_slowdown == pytest.approx(132 / 116 if is_gpu else 1.0)


def test_a_profile_from_traces_is_written_planned_and_simulated(both):
    profile = profile_from_json(both.to_json(), "profile")
    assert profile == both
    simulator = Simulator(CostModel(profile))
    stock_ms = simulator.expected_step(fixed_plan(1)).step_ms
    assert simulator.expected_step(make_plan(profile).plan).step_ms < stock_ms
    packed_ms = 4 * 2 * total_ms("permute")  # two micro-batches of two layers, forward and backward
    assert stock_ms - packed_ms < both.measured_steps_ms[STOCK]
    assert stock_ms == pytest.approx(both.measured_steps_ms[STOCK], rel=0.25)


def test_chunks_share_what_grows_with_tokens_and_pay_rest_each(tmp_path):
    profile = profile_from_traces(write(tmp_path, Recipe(), Recipe(rank=1)))
    ms = whole(profile)[Phase.FORWARD, OpKind.ATTENTION]
    core_ms = total_ms("baddbmm", "softmax", "bmm")
    chunks = {
        (op.chunk_dim, op.num_chunks, op.chunk): op.ms
        for op in profile.ops
        if (op.kind, op.phase) == (OpKind.ATTENTION, Phase.FORWARD) and op.layer_kind is LayerKind.MOE
    }
    fixed_ms = ms - total_ms(*ATTENTION)
    for chunk in range(2):
        assert chunks[ChunkDim.BATCH, 2, chunk] == pytest.approx((ms + fixed_ms) / 2, abs=0.001)
    first, second = (chunks[ChunkDim.SEQUENCE, 2, chunk] for chunk in range(2))
    assert second - first == pytest.approx(core_ms / 4, abs=0.001), "the first half of the queries sees half the keys"


def test_rows_of_one_rank_say_how_uneven_all_are(tmp_path):
    sent = (3 * ROWS // 4, ROWS // 4)
    (path,) = write(tmp_path, Recipe(sent=sent, steps=3))
    zipped = tmp_path / "rank-0.json.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    profile = profile_from_traces([zipped])
    assert profile.received_share == (0.75, 0.25)
    assert profile.routing == ()
    assert profile.paces == ()
    assert profile.model.ep_size == 2
    # Backward messages do not wait for the peer, so the quartile is their time alone.
    assert profile.link.all_to_all[-1][1] == pytest.approx(1.0, abs=TOLERANCE_MS)


def test_rows_are_those_of_a_stage_with_experts(tmp_path):
    """One rank of each of two stages, of which the first has no experts."""
    first, second = (
        Recipe(
            rank=2 * stage,
            layers=(kind,),
            sent=(3 * ROWS // 4, ROWS // 4),
            stage=(stage, 2),
            groups={
                "EXPERT_MODEL_PARALLEL_GROUP": [2 * stage, 2 * stage + 1],
                "PIPELINE_MODEL_PARALLEL_GROUP": [0, 2],
            },
        )
        for stage, kind in enumerate((DENSE, MOE))
    )
    profile = profile_from_traces(write(tmp_path, first, second))
    assert profile.received_share == (0.75, 0.25)


@pytest.mark.parametrize("group", ["TENSOR_MODEL_PARALLEL_GROUP", "CONTEXT_PARALLEL_GROUP"])
def test_no_sequence_chunks_where_a_rank_has_a_part(tmp_path, group):
    """The run refuses them; see ``sequence_blockers``."""
    groups = {"EXPERT_MODEL_PARALLEL_GROUP": [0, 1]}
    whole, part = (
        profile_from_traces(write(tmp_path, Recipe(groups={**groups, group: ranks}))) for ranks in ([0], [0, 1])
    )
    assert {op.chunk_dim for op in whole.ops if op.num_chunks > 1} == set(ChunkDim)
    assert {op.chunk_dim for op in part.ops if op.num_chunks > 1} == {ChunkDim.BATCH}
    assert {dw.num_chunks for dw in part.weight_grads} == {1, 2}


def test_the_group_is_also_read_from_the_kernels_of_messages(tmp_path):
    named, unnamed = Recipe(on_gpu=True), Recipe(on_gpu=True, groups={})
    assert profile_from_traces(write(tmp_path, unnamed)).ops == profile_from_traces(write(tmp_path, named)).ops


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_tp_sum_belongs_to_the_op_that_waits_for_it(tmp_path, on_gpu):
    summed, plain = (
        whole(profile_from_traces(write(tmp_path, Recipe(on_gpu=on_gpu, summed_us=us)))) for us in (700.0, 0.0)
    )
    longer = {key for key in plain if summed[key] - plain[key] > TOLERANCE_MS}
    assert longer == {(Phase.FORWARD, OpKind.ATTENTION)}
    assert summed[Phase.FORWARD, OpKind.ATTENTION] - plain[Phase.FORWARD, OpKind.ATTENTION] == pytest.approx(
        0.7, abs=TOLERANCE_MS
    )


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_pipeline_stages_make_the_profile_of_one_stage(tmp_path, on_gpu):
    """Three stages in the order 1F1B; the layer without experts is on the middle one."""
    layers = ((MOE,), (DENSE,), (MOE, MOE))
    usual = Recipe(on_gpu=on_gpu, micro_batches=3)
    of_stages = []
    for stage, own in enumerate(layers):
        for place in range(2):
            groups = {"EXPERT_MODEL_PARALLEL_GROUP": [2 * stage, 2 * stage + 1]}
            groups["PIPELINE_MODEL_PARALLEL_GROUP"] = [place, place + 2, place + 4]
            of_stages.append(
                replace(
                    usual, rank=2 * stage + place, layers=own, stage=(stage, 3), groups=groups, late_us=500.0 * place
                )
            )
    staged = profile_from_traces(write(tmp_path, *of_stages))
    whole_run = replace(usual, layers=(MOE, DENSE, MOE, MOE))
    plain = profile_from_traces(write(tmp_path, whole_run, replace(whole_run, rank=1, late_us=500.0)))
    assert (staged.model.layer_kinds, staged.model.stage_of_layer) == (plain.model.layer_kinds, (0, 1, 2, 2))
    assert staged.model.num_micro_batches == 3
    assert [op.kind for op in staged.ops] == [op.kind for op in plain.ops]
    for found, expected in zip(staged.ops, plain.ops, strict=True):
        assert found.ms == pytest.approx(expected.ms, abs=TOLERANCE_MS), expected
    assert [(dw.layer_kind, dw.name) for dw in staged.weight_grads] == [
        (dw.layer_kind, dw.name) for dw in plain.weight_grads
    ]
    assert [one.layer for one in staged.routing] == [1, 3, 4]
    assert staged.rest_ms < 0.5, "waits for other stages are none of it"
    plan = split_at_stages(fixed_plan(1), staged.model.stage_of_layer)
    assert Simulator(CostModel(staged)).expected_step(plan).step_ms > staged.measured_steps_ms[STOCK] / 2


def test_products_of_te_are_told_apart_by_their_kernels(tmp_path):
    own, te = (profile_from_traces(write(tmp_path, Recipe(on_gpu=True, te=te))) for te in (False, True))
    assert te.model == own.model
    assert [(dw.name, dw.after) for dw in te.weight_grads] == [(dw.name, dw.after) for dw in own.weight_grads]
    for found, expected in zip(te.weight_grads, own.weight_grads, strict=True):
        assert found.ms == pytest.approx(expected.ms, abs=TOLERANCE_MS)
    assert whole(te) == pytest.approx(whole(own), abs=TOLERANCE_MS)


def test_host_that_is_slow_inside_of_all_to_all_does_not_hide_it(tmp_path):
    """The time before the launch belongs to the op that makes the rows."""
    slow, usual = (profile_from_traces(write(tmp_path, Recipe(before_launch_us=us))) for us in (5000.0, 0.0))
    assert slow.link == usual.link
    assert whole(slow)[Phase.INPUT_GRAD, OpKind.POSTPROCESS] - whole(usual)[Phase.INPUT_GRAD, OpKind.POSTPROCESS] > 4.9


def test_several_traces_of_a_rank_count_as_more_steps(tmp_path):
    (first,) = write(tmp_path, Recipe(steps=1))
    second = tmp_path / "later.json"
    second.write_text(first.read_text())
    assert profile_from_traces([first, second]).measured_steps_ms[STOCK] > 0


def without(path, *names):
    content = json.loads(path.read_text())
    content["traceEvents"] = [one for one in content["traceEvents"] if not one["name"].startswith(names)]
    path.write_text(json.dumps(content))


GROUP = {"EXPERT_MODEL_PARALLEL_GROUP": [0, 1]}
REFUSED = {
    "no step markers": (Recipe(), ("ProfilerStep",), r"no step markers .* Record with Megatron's --profile --use-pyt"),
    "no shapes": (Recipe(shapes=False), (), "no shapes .*--pytorch-profiler-collect-shapes"),
    "no collectives": (Recipe(), ("c10d::alltoall",), "no all-to-all .*--expert-model-parallel-size of 2 or more"),
    "no counts": (Recipe(), ("c10d::_allgather",), "no exchange of token counts .*pad-expert-input"),
    "one step": (Recipe(steps=1), (), "1 step, where at least 2 are needed.*--profile-step-end"),
    "no backward": (Recipe(), ("autograd",), "a step without a backward pass"),
    "no embedding": (Recipe(), ("aten::embedding",), "without aten::embedding.*from the first pipeline stage on"),
    "no router": (Recipe(), ("Router", "aten::topk"), "no router .*--moe-router-fusion"),
    "no attention": (Recipe(), ("aten::bmm", "aten::baddbmm"), "no attention in front of a router.*hybrid"),
    "one stage": (
        Recipe(groups={**GROUP, "PIPELINE_MODEL_PARALLEL_GROUP": [0, 2]}),
        (),
        "2 pipeline stages, and no trace is of stage 1 .*each stage .--profile-ranks",
    ),
    "parts of experts": (
        Recipe(groups={**GROUP, "EXPERT_TENSOR_PARALLEL_GROUP": [0, 1]}),
        (),
        "2 ranks in a group EXPERT_TENSOR_PARALLEL.*--expert-tensor-parallel-size 1",
    ),
    "more predictions": (Recipe(oddity="mtp"), (), "as multi-token predictions have.*without --mtp-num-layers"),
    "overlap": (
        Recipe(oddity="overlap of micro-batches"),
        (),
        "a forward pass in its middle.*without --overlap-moe-expert-parallel-comm",
    ),
    "dW elsewhere": (
        Recipe(oddity="dW elsewhere", on_gpu=True, te=True),
        (),
        "1 product of matrices in the backward .*without --delay-wgrad-compute",
    ),
    "shared experts": (
        Recipe(oddity="shared experts during messages"),
        (),
        "a linear layer during an all-to-all .*without --moe-shared-expert-overlap",
    ),
    "no groups": (Recipe(groups={}), (), "no process group EXPERT_MODEL_PARALLEL_GROUP"),
    "dropped tokens": (Recipe(sent=(100, 20)), (), "a dispatch of 120 rows for 128 tokens with 2 experts each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_incomplete_trace_is_refused_with_the_flags_that_help(name, tmp_path):
    recipe, removed, message = REFUSED[name]
    (path,) = write(tmp_path, recipe)
    if removed:
        without(path, *removed)
    with pytest.raises(ValueError, match=message) as refusal:
        profile_from_traces([path])
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


def test_ranks_that_recorded_other_steps_are_refused(tmp_path):
    paths = write(tmp_path, Recipe(), Recipe(rank=1, steps=3))
    with pytest.raises(ValueError, match=r"3 steps of .* where rank 0 has 2"):
        profile_from_traces(paths)


@pytest.mark.parametrize("field", ["ts", "dur", "args", "name", "tid"])
@pytest.mark.parametrize("value", [None, "no", [], {}])
def test_a_damaged_event_is_refused_by_the_name_of_its_file(field, value, tmp_path):
    (path,) = write(tmp_path, Recipe())
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        if event["name"] in ("c10d::alltoall_base_", "aten::topk", "RouterGatingLinearFunction"):
            event[field] = value
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=r"rank-0\.json"):
        profile_from_traces([path])


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bno", b"[]", b"{}", b'{"traceEvents": 3}', b"\xff"])
def test_other_files_are_refused_by_name(content, tmp_path):
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank-0\.json"):
        profile_from_traces([path])

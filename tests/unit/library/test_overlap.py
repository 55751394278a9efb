"""What ``megatron_lancet.Overlap`` refuses before any message is sent."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculators
from megatron.core.distributed import DistributedDataParallel

import megatron_lancet
from megatron_lancet.errors import UsageError
from megatron_lancet.library.models import device_of, has_experts, language_model_of
from megatron_lancet.library.overlap import Overlap
from megatron_lancet.library.run_arguments import StepShape, check_packed_samples, run_arguments
from megatron_lancet.training.flag_conflicts import predicts_beside_loss
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE
from tests.small_gpt import EXPERTS, small_gpt, transformer_config

SHAPE = {"micro_batch_size": 1, "seq_length": 16}


def ddp_config():
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig()


def test_overlap_is_public():
    assert megatron_lancet.Overlap is Overlap
    with pytest.raises(AttributeError, match="has no attribute 'Overlapp'"):
        _ = megatron_lancet.Overlapp


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_chunk": 2}, "did you mean --lancet-num-chunks?"),
        ({"num_chunks": 0}, "--lancet-num-chunks expects at least 1, got 0"),
        ({"plan": "fast"}, "--lancet-plan expects auto, off or a plan file"),
        ({"packed_samples": True, "chunk_dim": "batch"}, "Pass chunk_dim='sequence' or num_chunks=1"),
        ({"profile": "profile.json"}, "--lancet-profile needs pretrain_gpt_moe.py"),
        ({"expert_placement": "FILE"}, "--lancet-expert-placement needs pretrain_gpt_moe.py: other launchers load"),
        ({"separate_expert_grads": True}, "--lancet-separate-expert-grads needs pretrain_gpt_moe.py"),
        ({"pack_documents": True}, "--lancet-pack-documents needs pretrain_gpt_moe.py"),
        ({"mock_link": "20:25"}, "--lancet-mock-link needs pretrain_gpt_moe.py"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UsageError) as refused:
        Overlap(SimpleNamespace(), **SHAPE, **settings)
    assert message in str(refused.value)


def test_settings_of_none_are_not_given():
    names = ("plan", "num_chunks", "report", "chunk_dim", "attention", "pairing")
    assert Overlap(**SHAPE, **dict.fromkeys(names))._config == Overlap(**SHAPE)._config


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda:3"), ("cpu:gloo,cuda:nccl", "cuda:3")])
def test_model_on_the_host_trains_where_its_ranks_talk(monkeypatch, backend, device):
    """Megatron-Bridge calls its hooks before it moves the weights."""
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of(torch.nn.Linear(1, 1)) == torch.device(device)


def test_hook_needs_the_configuration_of_ddp():
    with pytest.raises(UsageError, match="expected the DDP configuration of the model"):
        Overlap(**SHAPE)([torch.nn.Linear(2, 2)])


def test_hook_prepares_one_model_only():
    overlap = Overlap(SimpleNamespace(), **SHAPE)
    with pytest.raises(UsageError, match="found 0 in Linear"):
        overlap([torch.nn.Linear(2, 2)])
    with pytest.raises(UsageError, match="has prepared a model already"):
        overlap([torch.nn.Linear(2, 2)])


@pytest.mark.usefixtures("one_rank")
def test_one_overlap_at_a_time_changes_megatron():
    """Two that end in the order of their beginning would leave changes of the first one."""
    before, model = DistributedDataParallel.__init__, small_gpt(transformer_config(**EXPERTS))
    for begin in (Overlap.install, lambda overlap: overlap([model])):
        first, second = (Overlap(ddp_config(), **SHAPE, num_micro_batches=2, plan="off") for _ in range(2))
        begin(first)
        for begin_another in (Overlap.install, lambda overlap: overlap([model])):
            with pytest.raises(UsageError, match="expected one open Overlap in a process, found another one"):
                begin_another(second)
        first.close()
        with second.install() as overlap:  # which may be called then
            overlap([model])
        assert DistributedDataParallel.__init__ is before


@pytest.mark.usefixtures("one_rank")
def test_refused_model_leaves_megatron_as_it_was():
    before = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    with pytest.raises(UsageError, match="--lancet-attention"):
        Overlap(ddp_config(), **SHAPE, num_micro_batches=2, attention="sdpa")(
            [small_gpt(transformer_config(**EXPERTS))]
        )
    assert calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR is before
    Overlap(**SHAPE).install().close()


@pytest.mark.usefixtures("one_rank")
def test_language_model_is_found_in_a_larger_model():
    model = small_gpt(transformer_config(**EXPERTS))
    assert language_model_of(model) is model
    assert language_model_of(torch.nn.Sequential(torch.nn.Linear(2, 2), model)) is model
    assert has_experts(model)
    assert not has_experts(small_gpt(transformer_config()))
    with pytest.raises(UsageError, match="found 2 in ModuleList"):
        language_model_of(torch.nn.ModuleList([model, small_gpt(transformer_config())]))


@pytest.mark.usefixtures("one_rank")
def test_number_of_micro_batches_must_be_known():
    model = small_gpt(transformer_config(**EXPERTS))
    with pytest.raises(UsageError, match="expected num_micro_batches, found none"):
        Overlap(SimpleNamespace(), **SHAPE)([model])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("plan", ["off", "auto"])
def test_an_attention_kernel_for_stock_is_refused(plan):
    """There is one rank, so auto has nothing to overlap."""
    overlap = Overlap(ddp_config(), **SHAPE, num_micro_batches=2, plan=plan, attention="sdpa")
    with pytest.raises(UsageError, match="--lancet-attention sdpa needs a plan, and this model gets none"):
        overlap([small_gpt(transformer_config(**EXPERTS))])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("plan", ["off", "auto"])
def test_stock_says_that_a_report_is_not_written(plan, tmp_path):
    with Overlap(ddp_config(), **SHAPE, num_micro_batches=2, plan=plan, report=tmp_path / "report") as overlap:
        overlap([small_gpt(transformer_config(**EXPERTS))])
    assert f"--lancet-report {tmp_path / 'report'} is not written without a plan" in overlap.line


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("layout", "is_beside"),
    [
        ("Et|ttmL", True),
        ([["embedding", "decoder"], ["decoder", "decoder", "mtp", "loss"]], True),
        ("Ett|t|m|L", False),
        ([["embedding", "decoder", "decoder"], ["decoder"], ["mtp"], ["loss"]], False),
    ],
)
def test_predictions_in_a_layout_of_the_configuration(layout, is_beside):
    """Megatron's configuration has read the text, which a script's arguments keep."""
    model = small_gpt(transformer_config(**EXPERTS))
    pipeline = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "mtp_num_layers": 1}
    model.config = transformer_config(**EXPERTS, **pipeline, pipeline_model_parallel_layout=layout)
    args = run_arguments([model], ddp_config(), StepShape(1, 16, 2, has_packed_samples=True), 10)
    assert predicts_beside_loss(args) is is_beside


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("plan", "why"), [("off", "off: stock Megatron modules"), ("auto", "(packed samples) with context parallelism")]
)
def test_packed_samples_on_context_ranks_stay_stock(plan, why):
    """The launcher knows what its own layers do with them."""
    model = small_gpt(transformer_config(**EXPERTS))
    sizes = {"context_parallel_size": 2, "expert_model_parallel_size": 2, "mtp_num_layers": 1}
    model.config = transformer_config(**EXPERTS, **sizes)
    args = run_arguments([model], ddp_config(), StepShape(1, 16, 2, has_packed_samples=True), 10)
    args.transformer_impl = TRANSFORMER_ENGINE
    found, line = choose_plan(args, Overlap(**SHAPE, plan=plan)._config)
    assert found is None
    assert why in line
    args.transformer_impl = "local"
    with pytest.raises(UsageError, match="--mtp-num-layers does not work with this launcher's packing of samples"):
        choose_plan(args, Overlap(**SHAPE)._config)


@pytest.mark.parametrize(
    ("kind", "coefficient", "none"),
    [("seq_aux_loss", 0.1, 0.0), (["aux_loss", "seq_aux_loss"], [0.1, 0.1], [0.1, 0.0])],
)
def test_a_row_of_documents_is_no_sequence_of_a_loss(kind, coefficient, none):
    check_packed_samples(transformer_config(**EXPERTS), "rope")
    config = SimpleNamespace(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient)
    with pytest.raises(UsageError, match="seq_aux_loss does not work with packed samples"):
        check_packed_samples(config, "rope")
    config.moe_aux_loss_coeff = none  # Megatron computes no loss then
    check_packed_samples(config, "rope")


def test_a_row_of_documents_has_no_embedding_for_each_token():
    with pytest.raises(UsageError, match="mrope does not work with packed samples"):
        check_packed_samples(transformer_config(**EXPERTS), "mrope")

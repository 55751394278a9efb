"""The launch command of a run as settings of a modelled step: local layers, one stage, few layers, a mocked world."""

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.training.arguments import validate_args

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.cluster import on_the_cluster
from megatron_lancet.lab.dry_run.layout import choose_world
from megatron_lancet.model.recompute import DROPS_OUTPUTS
from megatron_lancet.registry import features
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.training import arguments
from megatron_lancet.training.flag_conflicts import check_flag_conflicts
from megatron_lancet.training.megatron.seams import check_seams
from megatron_lancet.training.plan.attention import check_attention
from megatron_lancet.training.plan.normalize import normalize_args
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import refuse_unsupported
from megatron_lancet.training.platform.detect import apply_cpu_settings

_RESET = {
    "use_distributed_optimizer": False,
    "overlap_param_gather": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "async_save": False,
    "load": None,
    "save": None,
    "pretrained_checkpoint": None,
    "tensorboard_dir": None,
    "wandb_project": None,
}
"""Arguments without an effect on a micro-batch, with the values that say so."""

_ONE_STAGE = {
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "num_virtual_stages_per_pipeline_rank": None,
}
"""Arguments of pipeline stages, with the values that say that there is one."""

_FEW_PIECES = 128
"""So that embedding, output layer and loss cost next to nothing: the host runs ahead while a large one is computed, and
a few layers would then show no launch cost."""


@dataclass(frozen=True)
class ModelledRun:
    """The model that is built and recorded.

    Attributes:
        args: Megatron's arguments, validated, for the ranks of one stage.
        plan: the plan of the run.
        num_ranks: ranks of the run.
        num_layers: layers of the full model.
        notes: what differs from the run of the launch command, in a line each.
    """

    args: argparse.Namespace
    plan: Plan
    num_ranks: int
    num_layers: int
    notes: tuple[str, ...]

    def with_layers(self, num_layers: int) -> argparse.Namespace:
        """The arguments of a model with this number of layers, all with experts."""
        args = copy.copy(self.args)
        args.num_layers = num_layers
        return args


def modelled_run() -> ModelledRun:
    """Parses ``sys.argv``, a launch command's arguments, and chooses the plan.

    Raises:
        UsageError: the run would refuse its arguments, or a modelled step can't follow them.
    """
    check_seams()
    args, config = arguments.parse(features())
    _without_data(args)
    as_run = copy.deepcopy(args)
    num_ranks = choose_world(args)[0]
    with on_the_cluster(args, config):
        _validate(as_run, config, num_ranks)
        _refuse_unknown(as_run, config)
        plan = _plan_of(as_run, config)
        num_ranks_of_stage = num_ranks // args.pipeline_model_parallel_size
        notes = ["embedding, output layer, loss, gradient reductions and optimizer are left out", *_simplified(args)]
        fused_activation, fused_rope = args.bias_swiglu_fusion, args.apply_rope_fusion
        apply_cpu_settings(args)
        args.bias_swiglu_fusion = fused_activation  # its kernels are compiled, and need no package
        # Megatron refuses it on a GPU without Transformer Engine. Latent attention has other kernels, not modelled.
        args.apply_rope_fusion = fused_rope and not (args.multi_latent_attention or args.rotary_interleaved)
        args.distributed_backend = "nccl"
        _validate(args, config, num_ranks_of_stage)
        check_attention(args, config)  # local layers refuse more than Transformer Engine's
        refuse_unsupported(args)
    return ModelledRun(args, plan, num_ranks, args.num_layers, tuple(notes))


def _without_data(args: argparse.Namespace) -> None:
    """Removes arguments without an effect on a micro-batch or its plan."""
    for name, value in _RESET.items():
        assert hasattr(args, name), f"Megatron has no argument {name}"
        setattr(args, name, value)
    args.mock_data, args.data_path = True, None
    args.padded_vocab_size = _FEW_PIECES * args.tensor_model_parallel_size
    if args.eval_interval is None:
        args.eval_interval = 1000
    args.lr = args.lr or 1.0  # a step has no rate
    if args.train_iters is None and args.train_samples is None:
        args.train_iters = 1


def _validate(args: argparse.Namespace, config: LancetConfig, num_ranks: int) -> None:
    args.rank, args.world_size = 0, num_ranks
    with arguments.megatrons_refusals():
        normalize_args(args, config)
        arguments.check_settings(args, config)
        check_flag_conflicts(args)
        validate_args(args)


def _simplified(args: argparse.Namespace) -> Iterator[str]:
    """Removes what is not modelled from parsed arguments; yields a note where that changes the time of a layer."""
    of_te = [module for module in args.recompute_modules or () if module in DROPS_OUTPUTS]
    if of_te and args.transformer_impl != "local":
        yield f"outputs of {', '.join(of_te)} are kept: to recompute them takes Transformer Engine's layers"
        args.recompute_modules = [module for module in args.recompute_modules if module not in of_te]
        if not args.recompute_modules:
            args.recompute_granularity = args.recompute_modules = None
    if args.transformer_impl != "local":
        yield "layers are Megatron's local ones: Transformer Engine's have fewer kernels, and are not modelled"
    if args.fp8 or args.fp4:
        yield "matrix products count as bf16: low precision needs Transformer Engine"
        args.fp8 = args.fp4 = None
        args.fp8_recipe, args.fp8_param_gather = "delayed", False
        args.moe_router_padding_for_fp8 = args.moe_router_padding_for_quantization = False
    if args.pipeline_model_parallel_size > 1:
        yield "pipeline stages and their messages are left out: all layers are on one stage"
    for name, value in _ONE_STAGE.items():
        assert hasattr(args, name), f"Megatron has no argument {name}"
        setattr(args, name, value)
    if args.mtp_num_layers:
        yield "multi-token prediction is left out"
        args.mtp_num_layers = None
    if args.dataloader_inter_document_masking:
        yield "attention sees whole samples: documents, which make it cheaper, have no lengths here"
        args.dataloader_inter_document_masking = False
    if args.moe_layer_freq not in (1, [1]):
        yield "all layers have experts, whatever --moe-layer-freq says"
        args.moe_layer_freq = 1


def _refuse_unknown(args: argparse.Namespace, config: LancetConfig) -> None:
    reasons = {
        **{
            flag: (value != entry.default, its.unmodelled)
            for flag, entry, its, value in config.entries()
            if its.unmodelled
        },
        "--hybrid-layer-pattern": (args.hybrid_layer_pattern, "its layers need Transformer Engine"),
        "--moe-expert-capacity-factor": (
            args.moe_expert_capacity_factor,
            "how many tokens are dropped depends on values, and the model has none",
        ),
        "--cpu-offloading-num-layers": (args.cpu_offloading_num_layers, "copies to the host are not modelled"),
    }
    for flag, (value, reason) in reasons.items():
        if value:
            raise UsageError(f"{flag} can't be modelled: {reason}. Drop it.")


def _plan_of(args: argparse.Namespace, config: LancetConfig) -> Plan:
    plan, line = choose_plan(args, config)
    if plan is None:
        raise UsageError(f"there is no plan to model: {line}.")
    if not plan.dispatch.is_plain:
        raise UsageError(
            f"dispatch={plan.dispatch} can't be modelled: how many rows it sends depends on values, and the model has "
            "none. Pass --lancet-dispatch plain, or a plan file with it."
        )
    return plan

"""Megatron's flags that the overlapping block does not support, and whether a run can overlap.

``docs/flags_table.py`` writes the rows of refused flags in ``docs/flags.md`` from these tables.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_lancet.config import OWN_SPEC, LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.feature_parts import Samples
from megatron_lancet.training.layer_pattern import hybrid_pattern, other_layers

OWN_DISPATCHER = "alltoall"
"""Megatron's name for the token dispatcher that the plan's all-to-alls replace."""
TRANSFORMER_ENGINE = "transformer_engine"
"""Value of Megatron's ``--transformer-impl`` for layers of Transformer Engine, and its default."""
OVERLAP_FLAGS = {
    "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
    "--delay-wgrad-compute": "delay_wgrad_compute",
    "--overlap-dispatch-backward-with-experts-wgrad": "overlap_dispatch_backward_with_experts_wgrad",
    "--moe-shared-expert-overlap": "moe_shared_expert_overlap",
    "--ep-overlap-early-attn-memory-release": "ep_overlap_early_attn_memory_release",
    "--defer-embedding-wgrad-compute": "defer_embedding_wgrad_compute",
}
"""Megatron's switches that overlap all-to-alls or defer weight gradients, and their names among the arguments."""
PADDING = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
"""Settings by which the router, and not the experts, pads the rows of each expert."""
_HYBRID_SPECS = (
    ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("megatron.core.models.hybrid.hybrid_layer_specs", "mamba_stack_spec"),
    ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
)
"""Values of ``--spec`` in scripts for hybrid models: names of the layers that Megatron also builds without it."""
_RECOMPUTABLE = {"core_attn", "mlp", "moe", "shared_experts"}
"""Values of ``--recompute-modules`` for any layers."""
_RECOMPUTABLE_WITH_TE = {"layernorm", "mla_up_proj", "moe_act"}
"""Values of ``--recompute-modules`` for layers of Transformer Engine; stock's recompute of them also needs it."""


class Topic(StrEnum):
    """Sections of ``docs/flags.md``."""

    MOE = "Mixture of Experts"
    OVERLAP = "Overlap"
    MEMORY = "Recompute, offloading, CUDA graphs"
    PARALLELISM = "Parallelism"
    MODEL = "Model"
    PRECISION = "Precision"
    RUN = "Another kind of run"


@dataclass(frozen=True)
class Unsupported:
    """Megatron's flags that are refused for one reason.

    Attributes:
        flags: names, separated by spaces.
        topic: section of the documentation; None for flags that it does not list.
        reason: why it is unsupported, for docs/flags.md.
        advice: what to do about a flag, for the refusal.
        even_zero: whether the flags are refused with any value, also 0.
        refused: for a flag whose refusal depends on more than its value: returns the value to report, True where the
            name says enough, or a false value where the flag is not refused.
    """

    flags: str
    topic: Topic | None
    reason: str
    advice: str = "drop it"
    even_zero: bool = False
    refused: Callable[[argparse.Namespace], object] | None = None

    def found_in(self, args: argparse.Namespace) -> Iterator[str]:
        """The flags that are set, with their values where these matter.

        Args:
            args: Megatron's arguments; validation deletes some that are not set, or are replaced by others.
        """
        for flag in self.flags.split():
            value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
            is_set = value is not None if self.even_zero else bool(value)
            refused = is_set if self.refused is None else self.refused(args)
            if refused:
                yield flag if refused is True else f"{flag} {refused}"


_GATHERED = "weights that are gathered for each use; dW would have to follow"
_AXES = "use expert, tensor, context, data and pipeline parallelism"
_REPLACED = "tied to modules whose forward pass the block replaces"
_INFERENCE = "layers for inference"
_OTHER_SPEC = (
    "layers of another specification; see [migration](migration.md#a-megatron-lm-checkout---spec) for the other "
    "direction"
)
_NO_SPEC = "drop it, layers of other specifications are not known to the block"
_TE = "for layers of Transformer Engine only"
_NO_TE = "drop it, or pass --transformer-impl transformer_engine"
_GROUPED_TE = "for Transformer Engine's grouped experts only"
_NO_GROUPED_TE = "drop it, or pass --transformer-impl transformer_engine --moe-grouped-gemm"
_FUSER = "Transformer Engine's op fuser computes dW inside its fused backward, where it can't be deferred"
_ONE_OP = "an operation of Transformer Engine's op fuser; it was not compared with stock in chunks"
_FUSER_ONLY = "Megatron's grouped linear layers there need Transformer Engine's op fuser, which defers no dW"
_SINGLE_WEIGHT = "one parameter for all experts; it needs Transformer Engine's op fuser, which defers no dW"
_USERBUFFERS = (
    "its buffers have the size of the full micro-batch, and Transformer Engine defers no dW with them; a CPU run "
    "switches it off"
)
_NO_USERBUFFERS = "drop it, userbuffers hold unchunked micro-batches and defer no dW"
_FUSED_RESIDUAL = "its norms also return the residual, which the block adds by itself"
_BY_MODULE = "sets the precision of single modules; the multiples that it asks of a chunk's tokens are not known"
_SYMMETRIC = "an all-reduce for inference in buffers of one size"
_TE_DOCUMENTS = "Transformer Engine's attention expects each document cut over the ranks, and samples are"
_NO_TE_DOCUMENTS = "pass --transformer-impl local"
_KITCHEN = "layers of the kitchen extension"
_NOT_IN_MOE = "not part of the block's MoE layer"
_NOT_IN_BLOCK = "not part of the block"
_UPCYCLING = "convert the checkpoint in a run of its own"
_LOCAL_MODULES = "local layers can't recompute these modules in stock either"
_MODULES = (
    f"choose among {', '.join(sorted(_RECOMPUTABLE))}, and with --transformer-impl transformer_engine "
    f"{', '.join(sorted(_RECOMPUTABLE_WITH_TE))}"
)
_RETIRED = "retired by Megatron"
_SAVED = "tied to what Megatron's own forward pass saves"
_GRAPHS = "the host must know the sizes of messages; [attention and routing](features/cuda_graphs.md) can be captured"
_NO_GRAPHS = "pass --lancet-cuda-graphs attention in place of it, or drop it"
_TEXT = "samples are plain text"
_NO_TEXT = "drop it, or use Megatron's pretrain_gpt.py"
_HOOKS = "Megatron's hooks keep the tensors of a layer's last call: one chunk for the full micro-batch"
_NO_HOOKS = "drop it, it would save one chunk for the full micro-batch"


def _weight_shards(args: argparse.Namespace) -> object:
    num_shards = args.tensor_parallel_num_weight_shards
    return (num_shards or 0) > args.tensor_model_parallel_size and num_shards


def _expert_weight_shards(args: argparse.Namespace) -> object:
    num_shards = args.expert_tensor_parallel_num_weight_shards
    return (num_shards or 0) > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) and num_shards


def _inference_layers(args: argparse.Namespace) -> object:
    return args.transformer_impl not in ("local", TRANSFORMER_ENGINE) and args.transformer_impl


def _with_local_layers(name: str) -> Callable[[argparse.Namespace], object]:
    """Returns a check that finds argument ``name`` set although the layers are not Transformer Engine's."""
    return lambda args: args.transformer_impl != TRANSFORMER_ENGINE and bool(getattr(args, name))


def _interleave_outside_grouped_experts(args: argparse.Namespace) -> object:
    grouped = args.transformer_impl == TRANSFORMER_ENGINE and args.moe_grouped_gemm
    return not grouped and bool(args.moe_mlp_glu_interleave_size)


def _other_spec(args: argparse.Namespace) -> object:
    known = (OWN_SPEC,) if hybrid_pattern(args) is None else _HYBRID_SPECS
    return args.spec is not None and tuple(args.spec) not in known and " ".join(args.spec)


def _other_modules(args: argparse.Namespace) -> object:
    modules = sorted(set(args.recompute_modules or ()) - _RECOMPUTABLE)
    if args.transformer_impl == TRANSFORMER_ENGINE:
        modules = [module for module in modules if module not in _RECOMPUTABLE_WITH_TE]
    return args.recompute_granularity == "selective" and " ".join(modules)


def _documents_in_te(args: argparse.Namespace) -> object:
    cuts_samples = args.dataloader_inter_document_masking and args.context_parallel_size > 1
    return cuts_samples and args.transformer_impl == TRANSFORMER_ENGINE and "(packed samples) with context parallelism"


def _graphs(args: argparse.Namespace) -> object:
    return args.cuda_graph_impl != "none" and args.cuda_graph_impl


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("--tensor-parallel-num-weight-shards", Topic.PARALLELISM, _GATHERED, _AXES, refused=_weight_shards),
    Unsupported(
        "--expert-tensor-parallel-num-weight-shards",
        Topic.PARALLELISM,
        _GATHERED,
        _AXES,
        refused=_expert_weight_shards,
    ),
    Unsupported(
        "--use-megatron-fsdp --use-torch-fsdp2", Topic.PARALLELISM, _REPLACED, "use --use-distributed-optimizer"
    ),
    Unsupported(
        "--fake-process-group", Topic.PARALLELISM, "no message would be sent", "use --distributed-backend mock"
    ),
    Unsupported("--lazy-mpu-init", Topic.PARALLELISM, "leaves Megatron without process groups"),
    Unsupported("--transformer-impl", None, _INFERENCE, "pass transformer_engine or local", refused=_inference_layers),
    Unsupported("--spec", Topic.MODEL, _OTHER_SPEC, _NO_SPEC, refused=_other_spec),
    Unsupported("--tp-comm-overlap", Topic.OVERLAP, _USERBUFFERS, _NO_USERBUFFERS),
    Unsupported("--dataloader-inter-document-masking", None, _TE_DOCUMENTS, _NO_TE_DOCUMENTS, refused=_documents_in_te),
    Unsupported("--use-transformer-engine-op-fuser", Topic.MODEL, _FUSER),
    Unsupported("--use-te-activation-func", Topic.MODEL, _ONE_OP),
    Unsupported("--te-precision-config-file", Topic.PRECISION, _BY_MODULE),
    Unsupported("--moe-single-grouped-weight --moe-single-grouped-bias", Topic.MOE, _SINGLE_WEIGHT),
    Unsupported("--use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp", Topic.MOE, _FUSER_ONLY),
    Unsupported("--moe-shared-expert-glu-interleave-size", Topic.MOE, _FUSER_ONLY),
    Unsupported(
        "--moe-mlp-glu-interleave-size",
        None,
        _GROUPED_TE,
        _NO_GROUPED_TE,
        refused=_interleave_outside_grouped_experts,
    ),
    Unsupported("--fused-residual-rmsnorm", Topic.MODEL, _FUSED_RESIDUAL),
    Unsupported("--symmetric-ar-type", Topic.MODEL, _SYMMETRIC),
    Unsupported("--use-kitchen-attention", Topic.MODEL, _KITCHEN),
    *(
        Unsupported(flag, None, _TE, _NO_TE, refused=_with_local_layers(name))
        for flag, name in {
            "--mla-down-proj-fusion": "mla_down_proj_fusion",
            "--qk-clip": "qk_clip",
            "--log-max-attention-logit": "log_max_attention_logit",
            "--fp8-format": "fp8",
            "--fp4-format": "fp4",
            "--fp8-output-proj": "fp8_output_proj",
        }.items()
    ),
    Unsupported("--moe-latent-size --moe-enable-routing-replay", Topic.MOE, _NOT_IN_MOE),
    Unsupported("--moe-expert-rank-capacity-factor", Topic.MOE, _NOT_IN_MOE, even_zero=True),
    Unsupported("--moe-routing-trace-path", Topic.MOE, _NOT_IN_MOE),
    Unsupported(
        "--mlp-chunks-for-training", Topic.MODEL, _NOT_IN_BLOCK, refused=lambda args: args.mlp_chunks_for_training > 1
    ),
    Unsupported("--heterogeneous-layers-config-path", Topic.MODEL, "other layers"),
    Unsupported("--heterogeneous-layers-config-encoded-json", Topic.MODEL, "other layers"),
    Unsupported("--experimental-attention-variant", Topic.MODEL, "other layers"),
    Unsupported("--hybrid-layer-pattern", None, "other layers", "use *, +, E and - only", refused=other_layers),
    Unsupported("--batch-invariant-mode --init-model-with-meta-device", Topic.MODEL, _NOT_IN_BLOCK),
    Unsupported("--moe-use-upcycling", Topic.MOE, "builds a second, dense model", _UPCYCLING),
    Unsupported("--recompute-modules", None, _LOCAL_MODULES, _MODULES, refused=_other_modules),
    Unsupported("--distribute-saved-activations --cpu-offloading-num-layers", Topic.MEMORY, _SAVED),
    Unsupported("--fine-grained-activation-offloading --moe-paged-stash", Topic.MEMORY, _SAVED),
    # Megatron's validation turns the first two into the third, and deletes them.
    Unsupported("--enable-cuda-graph --external-cuda-graph", Topic.MEMORY, _GRAPHS, _NO_GRAPHS),
    Unsupported("--cuda-graph-impl", Topic.MEMORY, _GRAPHS, _NO_GRAPHS, refused=_graphs),
    Unsupported("--save-activations-interval --save-dgrads-interval", Topic.MODEL, _HOOKS, _NO_HOOKS, even_zero=True),
    Unsupported("--save-tokens-per-expert-interval", Topic.MODEL, _HOOKS, _NO_HOOKS, even_zero=True),
)
"""Refused in a run that overlaps, in the order in which they are checked."""

RETIRED: tuple[Unsupported, ...] = (
    Unsupported("--checkpoint-activations", Topic.MEMORY, _RETIRED, "pass --recompute-granularity"),
    Unsupported(
        "--model-parallel-size", Topic.PARALLELISM, _RETIRED, "pass --tensor-model-parallel-size", even_zero=True
    ),
)
"""Refused in every run."""

OTHER_TASKS: tuple[Unsupported, ...] = (
    Unsupported("--sft --fim-data --perform-rl-step --logits-save-dir --logits-load-dir", Topic.RUN, _TEXT, _NO_TEXT),
    Unsupported("--per-dataset-sequences-path", Topic.RUN, "Megatron counts the sequences of data sets by itself"),
    Unsupported("--yaml-cfg", Topic.RUN, "settings come from flags", "pass flags"),
    Unsupported("--inprocess-restart", Topic.RUN, "a training is one start", "let the launcher start it again"),
    Unsupported("--hybrid-context-parallel", Topic.PARALLELISM, "shares out packed sequences in its own way"),
)
"""Refused in every run, because pretrain_gpt_moe.py trains otherwise."""


def unsupported(args: argparse.Namespace, validated: bool) -> Iterator[tuple[str, str]]:
    """Flags that the overlapping block does not support: (flag, what to do about it).

    Args:
        args: Megatron's arguments, after :func:`~megatron_lancet.training.plan.flag_mapping.map_overlap_flags`.
        validated: whether flags that ask for what the plan does should be mapped by now. Those that are still set come
            from a checkpoint's arguments, which Megatron reads after the mapping.
    """
    found = [(flag, entry.advice) for entry in UNSUPPORTED for flag in entry.found_in(args)]
    yield from found
    if found or not validated:
        return  # a run that can't overlap keeps the flags that would have been mapped
    if args.moe_token_dispatcher_type != OWN_DISPATCHER:
        dispatcher = f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}"
        yield dispatcher, f"pass --moe-token-dispatcher-type {OWN_DISPATCHER}"
    for flag, name in OVERLAP_FLAGS.items():
        if getattr(args, name):
            yield flag, "drop it, the plan does what it asks for"
    # Of a configuration that a library has built, where Megatron sets one of a pair from the other.
    for names in (PADDING, ("enable_autocast",), ("quant_recipe",)):
        if any(getattr(args, name, None) for name in names):
            yield " and ".join(names), "unset in the configuration"


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Refuses validated arguments with flags that the overlapping block does not support.

    Raises:
        UsageError: a flag is not supported.
    """
    for flag, advice in unsupported(args, validated=True):
        raise UsageError(f"{flag} does not work with the overlapping block yet: {advice}, or --lancet-plan off.")


def refuse_other_tasks(args: argparse.Namespace) -> None:
    """Refuses flags that Megatron has retired, and those that ask for something else than pretraining on text.

    Raises:
        UsageError: such a flag is set.
    """
    for entry in RETIRED:
        for flag in entry.found_in(args):
            raise UsageError(f"Megatron has retired {flag}: {entry.advice}.")
    for entry in OTHER_TASKS:
        for flag in entry.found_in(args):
            raise UsageError(f"pretrain_gpt_moe.py does not support {flag} ({entry.reason}): {entry.advice}.")


def own_samples(args: argparse.Namespace, config: LancetConfig) -> Samples | None:
    """Samples of another kind, if a feature has them; None for Megatron's."""
    found = (feature.samples(args, config) for feature in config.features)
    return next((samples for samples in found if samples is not None), None)


def micro_batch_shape(args: argparse.Namespace, config: LancetConfig) -> tuple[int, int]:
    """Samples of a micro-batch and positions of each, at most."""
    samples = own_samples(args, config)
    return (args.micro_batch_size, args.seq_length) if samples is None else (samples.num_samples, samples.num_positions)


def has_all_to_alls(args: argparse.Namespace) -> bool:
    """Whether the model has all-to-alls of expert parallelism."""
    has_experts = hybrid_pattern(args) is None or Symbols.MOE in (hybrid_pattern(args) or "")
    return bool(args.num_experts) and has_experts and args.expert_model_parallel_size > 1


def may_overlap(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether the run gets a plan, unless it is refused; without one its modules are stock.

    Args:
        args: Megatron's arguments, validated or not.
    """
    if isinstance(config.plan, Path):
        return True
    return config.plan is not PlanChoice.OFF and has_all_to_alls(args) and not overlap_blockers(args, config)


def overlap_blockers(args: argparse.Namespace, config: LancetConfig, validated: bool = False) -> list[str]:
    """Reasons why ``--lancet-plan auto`` falls back to stock modules, each with what to change; empty if it overlaps.

    Flags that ask for the overlap, such as a number of chunks or a profile, leave no fallback: the run is refused.

    Args:
        validated: see :func:`unsupported`.
    """
    needs_plan = any(feature.needs_plan(config) for feature in config.features)
    wants_overlap = config.explicit_plan_flags() or needs_plan
    if config.plan is not PlanChoice.AUTO or wants_overlap:
        return []
    found = unsupported(args, validated)
    return [f"{flag} does not work with the overlapping block yet ({advice})" for flag, advice in found]

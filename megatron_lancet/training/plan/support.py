"""Megatron's flags that the overlapping block does not support, and whether a run can overlap.

``docs/flags_table.py`` writes the rows of refused flags in ``docs/flags.md`` from these tables.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.reductions import CommPriority

OWN_DISPATCHER = "alltoall"
"""Megatron's name for the way in which tokens travel here."""
OVERLAP_FLAGS = {
    "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
    "--delay-wgrad-compute": "delay_wgrad_compute",
    "--overlap-dispatch-backward-with-experts-wgrad": "overlap_dispatch_backward_with_experts_wgrad",
    "--moe-shared-expert-overlap": "moe_shared_expert_overlap",
    "--ep-overlap-early-attn-memory-release": "ep_overlap_early_attn_memory_release",
    "--defer-embedding-wgrad-compute": "defer_embedding_wgrad_compute",
}
"""Switches that ask for all-to-alls, or weight gradients, beside other work; and their names among the arguments."""
OWN_SPEC = ("megatron_lancet.training.spec", "overlapped_gpt")
"""What Megatron's ``--spec`` names to get the overlapping block."""
_RECOMPUTABLE = {"core_attn", "mlp", "moe", "shared_experts"}
"""The others (layernorm, mla_up_proj, moe_act) fail in stock too without Transformer Engine."""


class Topic(StrEnum):
    """Sections of ``docs/flags.md``."""

    MOE = "Mixture of Experts"
    OVERLAP = "Overlap"
    MEMORY = "Recompute, offloading, CUDA graphs"
    PARALLELISM = "Parallelism"
    MODEL = "Model"
    PRECISION = "Precision"


@dataclass(frozen=True)
class Unsupported:
    """A flag of Megatron that is refused.

    Attributes:
        flag: its name.
        reason: why, for the documentation.
        advice: what to do about it, for the refusal.
        topic: section of the documentation; None for a flag that is not listed there.
        even_zero: whether it is refused with any value, also with 0.
        is_set: whether it is refused with its value, for a flag of which this depends on more.
        value: of the flag, for the refusal; None where the name says enough.
    """

    flag: str
    reason: str
    advice: str = "drop it"
    topic: Topic | None = None
    even_zero: bool = False
    is_set: Callable[[argparse.Namespace], object] | None = None
    value: Callable[[argparse.Namespace], object] | None = None

    def found_in(self, args: argparse.Namespace) -> str | None:
        """The flag, with its value where that matters; None where it is not set.

        Args:
            args: Megatron's arguments; validation deletes some that are not set, or are replaced by others.
        """
        setting = getattr(args, self.flag.removeprefix("--").replace("-", "_"), None)
        is_set = setting is not None if self.even_zero else bool(setting)
        if not (is_set if self.is_set is None else self.is_set(args)):
            return None
        return self.flag if self.value is None else f"{self.flag} {self.value(args)}"


def _each(
    topic: Topic | None, flags: str, reason: str, advice: str = "drop it", even_zero: bool = False
) -> tuple[Unsupported, ...]:
    return tuple(Unsupported(flag, reason, advice, topic, even_zero) for flag in flags.split())


_OTHER_PARALLELISM = "use expert, tensor, context, data and pipeline parallelism"
_GATHERED_WEIGHTS = "weights that are gathered for each use; dW would have to follow"
_TE_ONLY = "for layers of Transformer Engine only"
_TE_ADVICE = "drop it, it is for layers of Transformer Engine"
_GRAPHS = (
    "the size of a message is known only when token counts have come: no graph can hold the ops of a chunk, and single "
    "parts of a layer are not captured either"
)

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "--tensor-parallel-num-weight-shards",
        _GATHERED_WEIGHTS,
        _OTHER_PARALLELISM,
        Topic.PARALLELISM,
        is_set=lambda args: (args.tensor_parallel_num_weight_shards or 0) > args.tensor_model_parallel_size,
        value=lambda args: args.tensor_parallel_num_weight_shards,
    ),
    Unsupported(
        "--expert-tensor-parallel-num-weight-shards",
        _GATHERED_WEIGHTS,
        _OTHER_PARALLELISM,
        Topic.PARALLELISM,
        is_set=lambda args: (
            (args.expert_tensor_parallel_num_weight_shards or 0)
            > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
        ),
        value=lambda args: args.expert_tensor_parallel_num_weight_shards,
    ),
    *_each(
        Topic.PARALLELISM,
        "--use-megatron-fsdp --use-torch-fsdp2",
        "tied to modules whose forward pass the block replaces",
        "use --use-distributed-optimizer",
    ),
    *_each(Topic.PARALLELISM, "--fake-process-group", "no message would be sent", "use --distributed-backend mock"),
    *_each(Topic.PARALLELISM, "--lazy-mpu-init", "leaves Megatron without process groups"),
    Unsupported(
        "--transformer-impl",
        "only Megatron's local layers are overlapped; a CPU run sets them",
        "pass --transformer-impl local",
        Topic.MODEL,
        is_set=lambda args: args.transformer_impl != "local",
        value=lambda args: args.transformer_impl,
    ),
    Unsupported(
        "--spec",
        "layers of another specification; see [migration](migration.md#a-megatron-lm-checkout---spec) for the other "
        "direction",
        "drop it, layers of other specifications are not known to the block",
        Topic.MODEL,
        is_set=lambda args: args.spec is not None and tuple(args.spec) != OWN_SPEC,
        value=lambda args: " ".join(args.spec),
    ),
    *_each(Topic.OVERLAP, "--tp-comm-overlap", f"{_TE_ONLY}; a CPU run switches it off", _TE_ADVICE),
    *_each(
        Topic.MODEL,
        "--use-te-activation-func --use-transformer-engine-op-fuser --te-precision-config-file",
        _TE_ONLY,
        _TE_ADVICE,
    ),
    *_each(
        Topic.MOE,
        "--moe-single-grouped-weight --moe-single-grouped-bias --use-grouped-gemm-for-shared-expert "
        "--use-grouped-gemm-for-dense-mlp --moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size",
        _TE_ONLY,
        _TE_ADVICE,
    ),
    *_each(Topic.MODEL, "--fused-residual-rmsnorm --mla-down-proj-fusion", _TE_ONLY, _TE_ADVICE),
    *_each(Topic.PRECISION, "--fp8-output-proj", _TE_ONLY, _TE_ADVICE),
    *_each(
        Topic.MODEL,
        "--symmetric-ar-type --use-kitchen-attention --qk-clip --log-max-attention-logit",
        "for layers of Transformer Engine or of the kitchen extension only",
        _TE_ADVICE,
    ),
    Unsupported("--fp8-format", _TE_ONLY, topic=Topic.PRECISION, is_set=lambda args: args.fp8),
    Unsupported("--fp4-format", _TE_ONLY, topic=Topic.PRECISION, is_set=lambda args: args.fp4),
    *_each(Topic.MODEL, "--mtp-num-layers", "the block ends at the last layer; multi-token prediction comes after it"),
    *_each(Topic.MOE, "--moe-latent-size --moe-enable-routing-replay", "not part of the block's MoE layer"),
    *_each(
        Topic.MOE,
        "--moe-expert-rank-capacity-factor",
        "not part of the block's MoE layer",
        even_zero=True,
    ),
    *_each(
        Topic.MOE,
        "--moe-router-padding-for-quantization --moe-router-padding-for-fp8 --moe-routing-trace-path",
        "not part of the block's MoE layer",
    ),
    Unsupported(
        "--mlp-chunks-for-training",
        "not part of the block",
        topic=Topic.MODEL,
        is_set=lambda args: args.mlp_chunks_for_training > 1,
    ),
    *_each(
        Topic.MODEL,
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json "
        "--experimental-attention-variant",
        "other layers",
    ),
    *_each(Topic.MODEL, "--batch-invariant-mode --init-model-with-meta-device", "not part of the block"),
    *_each(
        Topic.MOE,
        "--moe-use-upcycling",
        "builds a second, dense model",
        "convert the checkpoint in a run of its own",
    ),
    Unsupported(
        "--recompute-modules",
        "local layers lack these modules, in stock too",
        f"choose among {', '.join(sorted(_RECOMPUTABLE))}",
        is_set=lambda args: args.recompute_granularity == "selective" and _not_recomputable(args),
        value=lambda args: " ".join(_not_recomputable(args)),
    ),
    *_each(
        Topic.MEMORY,
        "--distribute-saved-activations --cpu-offloading-num-layers --fine-grained-activation-offloading "
        "--moe-paged-stash",
        "tied to what Megatron's own forward pass saves",
    ),
    # Megatron's validation turns the first two into the third, and deletes them.
    *_each(Topic.MEMORY, "--enable-cuda-graph --external-cuda-graph", _GRAPHS),
    Unsupported(
        "--cuda-graph-impl",
        _GRAPHS,
        topic=Topic.MEMORY,
        is_set=lambda args: args.cuda_graph_impl != "none",
        value=lambda args: args.cuda_graph_impl,
    ),
    *_each(
        Topic.MODEL,
        "--save-activations-interval --save-dgrads-interval --save-tokens-per-expert-interval",
        "Megatron's hooks keep the tensors of a layer's last call: one chunk for the whole micro-batch",
        "drop it, it would save one chunk for the whole micro-batch",
        even_zero=True,
    ),
)
"""Refused in a run that overlaps, in the order in which they are looked for."""

RETIRED: tuple[Unsupported, ...] = (
    *_each(Topic.MEMORY, "--checkpoint-activations", "retired by Megatron", "pass --recompute-granularity"),
    *_each(
        Topic.PARALLELISM,
        "--model-parallel-size",
        "retired by Megatron",
        "pass --tensor-model-parallel-size",
        even_zero=True,
    ),
)
"""Refused in every run."""

OTHER_TASKS: tuple[Unsupported, ...] = (
    *_each(None, "--sft --fim-data", "other data"),
    *_each(Topic.PARALLELISM, "--hybrid-context-parallel", "packed sequences"),
    *_each(None, "--dataloader-inter-document-masking --perform-rl-step", "other data"),
    *_each(
        Topic.MODEL,
        "--hybrid-layer-pattern --hybrid-override-pattern --is-hybrid-model",
        "`pretrain_gpt_moe.py` builds GPT",
    ),
    *_each(None, "--logits-save-dir --logits-load-dir --yaml-cfg --per-dataset-sequences-path", "another kind of run"),
)
"""Refused in every run, because they ask for something else than to pretrain a GPT model on plain text."""


def _not_recomputable(args: argparse.Namespace) -> list[str]:
    return sorted(set(args.recompute_modules or ()) - _RECOMPUTABLE)


def unsupported(args: argparse.Namespace, validated: bool) -> Iterator[tuple[str, str]]:
    """Flags that the overlapping block does not support: (flag, what to do about it).

    Args:
        args: Megatron's arguments, after :func:`~megatron_lancet.training.plan.flag_mapping.map_overlap_flags`.
        validated: whether flags that mean the plan should be mapped by now.
    """
    for one in UNSUPPORTED:
        found = one.found_in(args)
        if found is not None:
            yield found, one.advice
    if validated:
        yield from _unmapped(args)


def _unmapped(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Flags that mean the plan, and are still set: sizes that Megatron takes from a checkpoint come after mapping."""
    if args.moe_token_dispatcher_type != OWN_DISPATCHER:
        dispatcher = f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}"
        yield dispatcher, f"pass --moe-token-dispatcher-type {OWN_DISPATCHER}"
    for flag, name in OVERLAP_FLAGS.items():
        if getattr(args, name):
            yield flag, "drop it, the plan does what it asks for"


def refuse_unsupported(args: argparse.Namespace) -> None:
    """
    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: the overlapping block does not support a flag.
    """
    for flag, advice in unsupported(args, validated=True):
        raise UsageError(f"{flag} does not work with the overlapping block yet: {advice}, or --lancet-plan off.")


def refuse_other_tasks(args: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: the run is to do something else than pretrain a GPT model on plain text, or asks for it in words
            that Megatron has retired.
    """
    for one in RETIRED:
        if one.found_in(args):
            raise UsageError(f"Megatron has retired {one.flag}: {one.advice}.")
    for one in OTHER_TASKS:
        if one.found_in(args):
            raise UsageError(f"{one.flag} is not supported by pretrain_gpt_moe.py: it pretrains GPT on plain text.")


def has_all_to_alls(args: argparse.Namespace) -> bool:
    """Whether the model has all-to-alls of expert parallelism."""
    return bool(args.num_experts) and args.expert_model_parallel_size > 1


def may_overlap(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Whether a plan will run, unless the run is refused; else modules stay stock.

    Args:
        args: Megatron's arguments, validated or not.
    """
    if isinstance(config.plan, Path):
        return True
    return config.plan is not PlanChoice.OFF and has_all_to_alls(args) and not overlap_blockers(args, config)


def overlap_blockers(args: argparse.Namespace, config: LancetConfig, validated: bool = False) -> list[str]:
    """Why a run that leaves the choice to us keeps stock modules, each with what to change; empty where it overlaps.

    A user who asks for a number of chunks, a range, a profile or the like wants the overlap, and is refused instead.

    Args:
        validated: whether flags that mean the plan should be mapped by now.
    """
    wants_overlap = config.explicit_plan_flags() or config.profile or config.comm_priority is not CommPriority.OFF
    if config.plan is not PlanChoice.AUTO or wants_overlap:
        return []
    found = unsupported(args, validated)
    return [f"{flag} does not work with the overlapping block yet ({advice})" for flag, advice in found]

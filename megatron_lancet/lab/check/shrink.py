"""Shrinks a launch to a few CPU ranks: small sizes, the same features, and each parallel axis of at most two ranks."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.dry_run_flags import DryRunConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature_parts import SmallLaunch
from megatron_lancet.flags import flags_of
from megatron_lancet.lab.check.layout import Layout
from megatron_lancet.lab.check.words import CommandLine
from megatron_lancet.training.arguments import megatrons_refusals
from megatron_lancet.training.plan.flag_mapping import OTHER_DISPATCHERS
from megatron_lancet.training.plan.support import OVERLAP_FLAGS

MICRO_BATCHES = 8
"""Micro-batches of a step on one data-parallel rank; more such ranks share them out."""
_AXIS = 2
_SEQ_LENGTH = 16
_NUM_EXPERTS = 8
_MODEL_SECTIONS = ("transformer configuration", "network size", "moe", "mla", "experimental_attention_variant")
_KEPT_OF_OTHERS = (
    *("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer", "--ddp-average-in-collective"),
    *("--use-tp-pp-dp-mapping", "--no-overlap-p2p-communication", "--rope-type", "--enable-experimental"),
)
"""Flags of the parser's other sections that change how gradients are computed or reduced."""
_RECOMPUTABLE = ("core_attn", "mlp", "moe", "shared_experts")
_SIZES = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--num-query-groups", "--ffn-hidden-size"),
    *("--kv-channels", "--seq-length", "--max-position-embeddings", "--num-experts", "--moe-ffn-hidden-size"),
    *("--moe-shared-expert-intermediate-size", "--moe-router-topk", "--moe-router-num-groups", "--moe-latent-size"),
    *("--moe-router-group-topk", "--moe-layer-freq", "--q-lora-rank", "--kv-lora-rank"),
    *("--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--make-vocab-size-divisible-by"),
    *("--init-method-std", "--embedding-init-method-std", "--hidden-dropout", "--attention-dropout"),
    *("--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--moe-expert-capacity-factor", "--transformer-impl"),
    *("--moe-router-load-balancing-type", "--moe-token-dispatcher-type", "--recompute-modules"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-activations"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel", "--disable-bias-linear"),
)
"""Flags that are given anew."""
_ON_GPUS = {
    "low precision": "--bf16 --fp16 --fp8 --fp4 --moe-router-padding-for --first-last-layers-bf16 --num-layers-at "
    "--apply-query-key-layer-scaling --keep-fp8 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
    "offloading": "--cpu-offloading --fine-grained-activation-offloading --offload --activation-offload",
    "other dispatchers": " ".join(f"--{prefix.replace('_', '-')}" for prefix in OTHER_DISPATCHERS),
    "an uneven or finer cut": "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards "
    "--account-for --microbatch-group-size --hierarchical-context --decoder-first --decoder-last "
    "--pipeline-model-parallel-layout",
    "chance": "--moe-input-jitter-eps --moe-router-force",
}
"""Parts that are left out, with the prefixes of their flags."""


@dataclass(frozen=True)
class Shrunk:
    """A launch on a few ranks.

    Attributes:
        words: flags of the model and of training, without the layout.
        ours: flags of the overlap.
        layout: the launch's axes, each of at most two ranks.
        changes: what is different from the launch apart from its sizes, for the user.
        stock_mask: whether stock gets a mask that keeps documents of a sample apart.
    """

    words: list[str]
    ours: list[str]
    layout: Layout
    changes: list[str]
    stock_mask: bool = False


def shrink(
    line: CommandLine, num_ranks: int | None, max_ranks: int, padding: bool = False, with_kernels: bool = False
) -> Shrunk:
    """Shrinks a launch.

    Args:
        num_ranks: of the launch; None if it is not known.
        max_ranks: of the check.
        padding: whether samples will have padding, which Megatron does not send to later pipeline stages.
        with_kernels: whether kernels that also run on a CPU stay what they are.

    Raises:
        UsageError: a feature that is not checked.
    """
    line = replace(line, args=argparse.Namespace(**vars(line.args)))
    for feature in line.config.features:
        list(feature.normalize(line.args, line.config))
    _refuse_others(line)
    layout, changes = _layout(line, num_ranks, max_ranks, padding)
    launch = SmallLaunch(line.args, vars(layout), with_kernels, dict(_ON_GPUS))
    for feature in line.config.features:
        feature.shrink(launch)
    on_gpus = launch.left_out
    left_out = [flag for beginnings in on_gpus.values() for flag in _given(line, beginnings)]
    sections = {section for section in line.sections.values() if section not in _MODEL_SECTIONS}
    others = [word for flag in line.flags if flag[0] in _KEPT_OF_OTHERS for word in flag]
    words = line.kept(sections, [*_SIZES, *launch.anew, *left_out, *OVERLAP_FLAGS])
    words += others
    changes += [f"not checked: {what} ({found})" for what, b in on_gpus.items() if (found := " ".join(_given(line, b)))]
    changes += launch.changes
    for flags, change in _given_anew(line.args):
        words += flags
        changes += [change] if change else []
    unchecked = _unchecked_flags(line.config)
    ours = [*line.overlap_words(unchecked), *launch.ours]
    if line.config.plan is PlanChoice.AUTO and not line.config.asks_for_chunks:
        ours += _CHUNKS
    given = {flag[0] for flag in line.flags}
    changes += [f"not checked: {what} ({flag})" for flag, what in unchecked.items() if what and flag in given]
    words += [*_sizes(line.args, layout), *_RUN, *launch.flags, *([] if launch.stock_mask else _NO_MASK)]
    return Shrunk(words, ours, layout, changes, launch.stock_mask)


_RUN = (
    f"--micro-batch-size 2 --global-batch-size {2 * MICRO_BATCHES} --lr 1e-5 --train-iters 1 --eval-iters 0 "
    "--eval-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 1 "
    "--num-workers 0 --clip-grad 1e9 --init-method-std 0.1 --hidden-dropout 0 "
    "--attention-dropout 0 --transformer-impl local"
).split()
_CHUNKS = ["--lancet-num-chunks", "2"]
"""A tuned run may have chunks, which change the order of sums; a run of a few steps has pairs, which do not."""
_NO_MASK = ["--no-create-attention-mask-in-dataloader"]


def _given(line: CommandLine, beginnings: str) -> list[str]:
    return [flag[0] for flag in line.flags if flag[0].startswith(tuple(beginnings.split()))]


def _refuse_others(line: CommandLine) -> None:
    args = line.args
    refused = {
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        **{flag: True for feature in line.config.features for flag in feature.layout_blockers(args)},
        "--spec": args.spec,
        "--experimental-attention-variant": args.experimental_attention_variant,
        "--heterogeneous-layers-config-path": args.heterogeneous_layers_config_path,
        "--use-checkpoint-args": args.use_checkpoint_args,
        "--yaml-cfg": args.yaml_cfg,
    }
    for flag, is_given in refused.items():
        if is_given:
            raise UsageError(
                f"{flag} is not checked: a check builds Megatron's GPT from flags and runs it on CPUs. Drop it to "
                "check the rest of the launch."
            )
    if args.num_layers is None or args.hidden_size is None or args.num_attention_heads is None:
        raise UsageError("a check needs the model's sizes: pass --num-layers, --hidden-size, --num-attention-heads.")


def _layout(line: CommandLine, num_ranks: int | None, max_ranks: int, padding: bool) -> tuple[Layout, list[str]]:
    """The axes that the check has, and why some of the launch's are left out."""
    args = line.args
    moe, tensor = bool(args.num_experts), args.tensor_model_parallel_size
    sizes = {
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "tensor": tensor,
        "expert": args.expert_model_parallel_size if moe else 1,
        "expert_tensor": (args.expert_tensor_parallel_size or tensor) if moe else 1,
        "virtual": _virtual_stages(args),
    }
    axes = {name: min(size, _AXIS) for name, size in sizes.items()}
    changes: list[str] = []
    if padding and axes["pipeline"] > 1:
        changes.append("no pipeline stages: Megatron gives the mask of padding to the first stage only")
        axes["pipeline"] = 1
    if padding and axes["context"] > 1 and not args.calculate_per_token_loss:
        changes.append(
            "no context parallelism: without --calculate-per-token-loss each rank averages over its own tokens, which "
            "with padding is another mean by definition"
        )
        axes["context"] = 1
    changes += [why for feature in line.config.features for why in feature.shrink_axes(args, axes)]
    axes["virtual"] = axes["virtual"] if axes["pipeline"] > 1 else 1
    layout = Layout(**axes, sequence=bool(args.sequence_parallel and axes["tensor"] > 1)).fitted()
    model_ranks = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    with_data = replace(layout, data=layout.data * 2).fitted()
    has_data_parallelism = num_ranks is None or num_ranks > model_ranks
    if layout.data == 1 and has_data_parallelism and with_data.num_ranks <= max_ranks:
        layout = with_data
    if layout.num_ranks > max_ranks:
        raise UsageError(
            f"the axes of this launch ({layout}) take {layout.num_ranks} ranks, each with two of them; --max-ranks is "
            f"{max_ranks}. Raise it, or drop an axis."
        )
    return layout, changes


def _virtual_stages(args: argparse.Namespace) -> int:
    """Virtual pipeline stages of a rank of the launch."""
    pipeline = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout:
        with megatrons_refusals():
            num_stages = PipelineParallelLayerLayout.get_num_stages_from_str(args.pipeline_model_parallel_layout)
        return max(1, num_stages // pipeline)
    if args.num_layers_per_virtual_pipeline_stage:
        return max(1, args.num_layers // (pipeline * args.num_layers_per_virtual_pipeline_stage))
    return args.num_virtual_stages_per_pipeline_rank or 1


def _layers(args: argparse.Namespace, layout: Layout) -> tuple[int, list[str]]:
    """Number of layers, and the flags that say which have experts: at least one of each kind that the launch has."""
    freq = args.moe_layer_freq
    kinds = [int(index % freq == 0) for index in range(args.num_layers)] if isinstance(freq, int) else list(freq)
    num_stages = layout.pipeline * layout.virtual
    num_layers = max(2, num_stages)
    if not args.num_experts:
        return num_layers, []
    num_dense = 1 if 0 in kinds else 0
    return num_layers, ["--moe-layer-freq", f"([0]*{num_dense}+[1]*{num_layers - num_dense})"]


def _sizes(args: argparse.Namespace, layout: Layout) -> Iterator[str]:
    """Yields the flags of the model's sizes."""
    num_layers, kinds = _layers(args, layout)
    groups = args.num_query_groups if args.group_query_attention else None
    sizes: dict[str, object] = {
        "--num-layers": num_layers,
        "--hidden-size": 32,
        "--num-attention-heads": 4,
        "--ffn-hidden-size": 48,
        "--kv-channels": 8,
        "--seq-length": _SEQ_LENGTH,
        "--max-position-embeddings": _SEQ_LENGTH,
    }
    if groups is not None:
        sizes["--num-query-groups"] = 1 if groups < args.tensor_model_parallel_size else 2
    if args.multi_latent_attention:
        sizes |= {"--kv-lora-rank": 16, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 8}
        sizes |= {"--q-lora-rank": 16} if args.q_lora_rank else {}
    if args.num_experts:
        sizes |= {"--num-experts": min(args.num_experts, _NUM_EXPERTS), "--moe-ffn-hidden-size": 24}
        sizes["--moe-router-topk"] = min(args.moe_router_topk, 2, int(str(sizes["--num-experts"])))
        if args.moe_shared_expert_intermediate_size:
            sizes["--moe-shared-expert-intermediate-size"] = 24
        if args.moe_latent_size:
            sizes["--moe-latent-size"] = 16
        if args.moe_router_num_groups:
            sizes |= {"--moe-router-num-groups": 2, "--moe-router-group-topk": 1}
    for flag, value in sizes.items():
        yield from (flag, str(value))
    yield from kinds


def _given_anew(args: argparse.Namespace) -> Iterator[tuple[list[str], str]]:
    """Yields flags that are given anew, with what is different; an empty text if nothing is."""
    modules = [module for module in args.recompute_modules or [] if module in _RECOMPUTABLE]
    is_selective = args.recompute_granularity == "selective" or args.recompute_activations
    if args.recompute_granularity == "full":
        yield ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"], ""
    elif is_selective and (modules or not args.recompute_modules):
        yield ["--recompute-granularity", "selective", "--recompute-modules", *(modules or ["core_attn"])], ""
    if lost := [module for module in args.recompute_modules or [] if is_selective and module not in modules]:
        yield [], f"no recompute of {', '.join(lost)}, which Megatron's local layers don't have: not checked"
    if args.num_distributed_optimizer_instances > 1:
        yield [], "one instance of the distributed optimizer (--num-distributed-optimizer-instances)"
    if not args.num_experts:
        yield (["--disable-bias-linear"] if not args.add_bias_linear else []), ""
        return
    change = "no biases in linear layers: Megatron's local experts can't have them on one rank"
    yield ["--disable-bias-linear"], change if args.add_bias_linear else ""
    dispatcher = args.moe_token_dispatcher_type
    change = f"--moe-token-dispatcher-type alltoall in place of {dispatcher}, which needs GPUs"
    is_known = dispatcher in ("alltoall", "allgather")
    yield ["--moe-token-dispatcher-type", dispatcher if is_known else "alltoall"], "" if is_known else change
    yield from _balancing(args)
    if args.moe_expert_capacity_factor is not None and args.moe_expert_capacity_factor >= 0:
        num_experts = min(args.num_experts, _NUM_EXPERTS)
        yield (
            ["--moe-expert-capacity-factor", str(num_experts / min(args.moe_router_topk, 2))],
            "a capacity that drops no token: which ones are dropped depends on the layout by definition",
        )


def _balancing(args: argparse.Namespace) -> Iterator[tuple[list[str], str]]:
    """Yields the flags of the routers' losses; their coefficients are large enough for an error in them to show."""
    by_definition = {
        "sinkhorn": "routes by what else a rank has",
        "global_aux_loss": "is a running mean over micro-batches, which each layout orders in its own way",
    }
    given = args.moe_router_load_balancing_type
    kinds = given if isinstance(given, list) else [given]
    for kind in kinds:
        if kind in by_definition:
            yield [], f"aux_loss in place of {kind}, which {by_definition[kind]}: not comparable by definition"
    if "sinkhorn" in kinds and args.moe_router_topk == 1 and not args.moe_router_pre_softmax:
        yield ["--moe-router-pre-softmax"], ""  # else its probabilities would be 1
    kinds = list(dict.fromkeys("aux_loss" if kind in by_definition else kind for kind in kinds))
    yield ["--moe-router-load-balancing-type", *kinds], ""
    coefficients = args.moe_aux_loss_coeff
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    if any(coefficients):
        yield ["--moe-aux-loss-coeff", *["0.1"] * len(kinds)], ""
    if args.moe_z_loss_coeff:
        yield ["--moe-z-loss-coeff", "0.01"], ""


def _unchecked_flags(config: LancetConfig) -> dict[str, str]:
    """Flags that a check on a few CPU ranks leaves out, by name, with the part of the run that is not checked."""
    kinds = (LancetConfig, DryRunConfig, *config.settings)
    flags = [(name, its) for kind in kinds for name, _, its in flags_of(kind)]
    return {name: its.unchecked for name, its in flags if its.unchecked is not None}

"""From the command line to validated arguments: Megatron's parser, our flags, one clear line for each fault."""

import argparse
import difflib
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from megatron_lancet import __version__
from megatron_lancet.config import DEFAULT_TUNE_STEPS, AttentionChoice, LancetConfig, PlanChoice
from megatron_lancet.errors import UsageError, reason_of
from megatron_lancet.schedule.plan import ChunkDim, DwPolicy, OverlapRange
from megatron_lancet.schedule.reductions import DEFAULT_CHUNK_MB, CommPriority
from megatron_lancet.training.checkpoint.ep_resize import check_experts_apart
from megatron_lancet.training.checkpoint.load_save import check_before_start
from megatron_lancet.training.dry_run.flags import add_dry_run_arguments, check_flags
from megatron_lancet.training.input_files import check_datasets, missing_files
from megatron_lancet.training.plan.select import OWN_SPEC
from megatron_lancet.training.platform.mock import add_mock_arguments, check_mock_arguments


def add_lancet_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the ``--lancet-*`` flags to Megatron's parser and makes its errors short."""
    group = parser.add_argument_group("Megatron-Lancet", "hide the all-to-all of expert parallelism")
    group.add_argument("--version", action="version", version=f"megatron-lancet {__version__}")
    _add_plan_arguments(group)
    _add_priority_arguments(group)
    _add_run_arguments(group)
    add_dry_run_arguments(group)
    add_mock_arguments(parser, group)
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    for action in parser._actions:
        # Megatron has help texts with bare percent signs, on which argparse fails when --help is asked for.
        action.help = action.help and re.sub(r"(%%|%\(\w+\)s)|%", lambda found: found[1] or "%%", action.help)
    return parser


def _add_plan_arguments(group: argparse._ArgumentGroup) -> None:
    """Which plan, and how it is limited."""
    group.add_argument(
        "--lancet-plan",
        default=PlanChoice.AUTO.value,
        metavar="{auto,off,FILE}",
        help="auto (default): measures the first steps, finds the fastest plan and switches to it; with "
        "--lancet-num-chunks a fixed plan instead. off: stock Megatron modules. FILE: a plan file of "
        "tools/make_plan.py that was made for this model and layout.",
    )
    group.add_argument(
        "--lancet-num-chunks",
        type=int,
        metavar="K",
        help="cut each micro-batch into K chunks; by default the plan chooses. 1 leaves it whole.",
    )
    group.add_argument(
        "--lancet-chunk-dim",
        choices=["auto", *(dim.value for dim in ChunkDim)],
        default="auto",
        help="dimension along which micro-batches are cut: batch, sequence (chunks attend to the keys and values of "
        "earlier ones: also a micro-batch of 1 can be cut), or auto (default): the plan chooses; a fixed plan takes "
        "batch where it has enough samples.",
    )
    group.add_argument(
        "--lancet-range",
        choices=[choice.value for choice in OverlapRange],
        help="what runs chunk by chunk: experts (dispatch to combine), gate (router to combine), layer (with its "
        "attention), stack (all layers without waiting at a layer's end). By default the plan chooses; a fixed plan "
        "takes stack.",
    )
    group.add_argument(
        "--lancet-attention",
        choices=[choice.value for choice in AttentionChoice],
        default=AttentionChoice.AUTO.value,
        help="core attention: stock (Megatron's), sdpa (torch's fused kernel), auto (default): stock unless sequence "
        "chunks, context parallelism or multi-latent attention need sdpa.",
    )
    group.add_argument(
        "--lancet-dw-policy",
        choices=[policy.value for policy in DwPolicy],
        help="weight gradients: fill runs them while a backward all-to-all is in flight, none at once. By default the "
        "plan chooses; a fixed plan fills.",
    )
    group.add_argument(
        "--lancet-dw-memory-mb",
        type=float,
        metavar="MB",
        help="memory (10^6 bytes) that deferred weight gradients may keep alive on a rank; when it is full the oldest "
        "run first. By default only the plan's window bounds it.",
    )


def _add_run_arguments(group: argparse._ArgumentGroup) -> None:
    """What a run measures, keeps and writes."""
    group.add_argument(
        "--lancet-report",
        type=Path,
        metavar="DIR",
        help="also write the closing report to DIR/report.json, and beside it the plan, the profile and the timeline "
        "of a step (timeline.html, trace.json).",
    )
    group.add_argument(
        "--lancet-tune-steps",
        type=int,
        default=DEFAULT_TUNE_STEPS,
        metavar="N",
        help=f"training steps that auto measures at a time, before and after a change of plan (default: "
        f"{DEFAULT_TUNE_STEPS}).",
    )
    group.add_argument(
        "--lancet-cache",
        default="auto",
        metavar="DIR",
        help="where auto keeps measured profiles, so that later runs of the same model on the same device need not "
        "measure again; off keeps none. Default: megatron-lancet in $XDG_CACHE_HOME or ~/.cache.",
    )
    group.add_argument(
        "--lancet-profile",
        type=Path,
        metavar="FILE",
        help="measure ops, links and memory in the first steps, write them to FILE (JSON) and end; "
        "tools/profile_model.py sets it.",
    )


def _add_priority_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lancet-comm-priority",
        choices=[priority.value for priority in CommPriority],
        default=CommPriority.OFF.value,
        help="all-to-all-first cuts gradient reductions into parts that run only where no all-to-all of the backward "
        "pass is in flight or about to start; needs --overlap-grad-reduce. off (default): Megatron reduces each bucket "
        "as soon as it is complete.",
    )
    group.add_argument(
        "--lancet-grad-chunk-mb",
        type=float,
        default=DEFAULT_CHUNK_MB,
        metavar="MB",
        help="with --lancet-comm-priority, gradients (10^6 bytes) in one such part, and at one place between two "
        f"all-to-alls, at most (default: {DEFAULT_CHUNK_MB:g}).",
    )
    group.add_argument(
        "--lancet-experts-apart",
        action="store_true",
        help="with --expert-model-parallel-size 1, keep experts' gradients and optimizer state apart from dense "
        "weights', as with larger sizes: a run may then go on from a checkpoint with the other size, and back.",
    )


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Fail like argparse, but without the usage text of a thousand flags, and with a guess at what was meant."""
    hints = []
    for word in message.replace(":", " ").split():
        if word.startswith("--") and word not in parser._option_string_actions:
            close = difflib.get_close_matches(word, parser._option_string_actions, n=1)
            hints += [f"{word}: did you mean {close[0]}?"] if close else []
    raise UsageError(". ".join([message, *hints]) + ". --help lists all flags.")


def parse() -> tuple[argparse.Namespace, LancetConfig]:
    """Parse ``sys.argv`` with Megatron's parser; nothing is validated against each other yet.

    Raises:
        UsageError: an unknown flag or a value that a flag does not take.
    """
    args = parse_args(add_lancet_arguments)
    check_flags(args)
    return args, _config_of(args)


def config_from_words(words: Sequence[str]) -> LancetConfig:
    """The ``--lancet-*`` flags where the command line is another program's.

    Raises:
        UsageError: an unknown flag or a value that a flag does not take.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    group = parser.add_argument_group()
    _add_plan_arguments(group)
    _add_priority_arguments(group)
    _add_run_arguments(group)
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    return _config_of(parser.parse_args(words))


def _config_of(args: argparse.Namespace) -> LancetConfig:
    if args.lancet_num_chunks is not None and args.lancet_num_chunks < 1:
        raise UsageError(f"--lancet-num-chunks expects at least 1, got {args.lancet_num_chunks}.")
    if args.lancet_dw_memory_mb is not None and not 0 < args.lancet_dw_memory_mb < math.inf:
        raise UsageError(
            f"--lancet-dw-memory-mb expects a number of MB above 0, got {args.lancet_dw_memory_mb:g}. To run "
            "weight gradients at once pass --lancet-dw-policy none; without the flag memory for them is not bounded."
        )
    if args.lancet_tune_steps < 1:
        raise UsageError(f"--lancet-tune-steps expects at least 1, got {args.lancet_tune_steps}.")
    if not 0 < args.lancet_grad_chunk_mb < math.inf or args.lancet_grad_chunk_mb * 1e6 < 1:
        raise UsageError(
            f"--lancet-grad-chunk-mb expects a number of MB above 0, got {args.lancet_grad_chunk_mb:g}. To reduce "
            "whole buckets pass --lancet-comm-priority off."
        )
    return LancetConfig(
        plan=_plan_choice(args.lancet_plan, must_exist=not getattr(args, "lancet_dry_run", False)),
        num_chunks=args.lancet_num_chunks,
        chunk_dim=None if args.lancet_chunk_dim == "auto" else ChunkDim(args.lancet_chunk_dim),
        range=OverlapRange(args.lancet_range) if args.lancet_range else None,
        attention=AttentionChoice(args.lancet_attention),
        dw_policy=DwPolicy(args.lancet_dw_policy) if args.lancet_dw_policy else None,
        dw_memory_mb=args.lancet_dw_memory_mb,
        report_dir=args.lancet_report,
        tune_steps=args.lancet_tune_steps,
        cache_dir=_cache_dir(args.lancet_cache),
        profile=args.lancet_profile,
        comm_priority=CommPriority(args.lancet_comm_priority),
        grad_chunk_mb=args.lancet_grad_chunk_mb,
        experts_apart=args.lancet_experts_apart,
    )


def _cache_dir(choice: str) -> Path | None:
    if choice == "off":
        return None
    if choice != "auto":
        return Path(choice)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-lancet"
    except RuntimeError:  # no home, as in some containers
        return None


def _plan_choice(text: str, must_exist: bool) -> PlanChoice | Path:
    if text in list(PlanChoice):
        return PlanChoice(text)
    if must_exist and not Path(text).is_file():
        raise UsageError(f"--lancet-plan expects auto, off or a plan file; there is no file {text}.")
    return Path(text)


def validate(args: argparse.Namespace) -> None:
    """Run our checks, then Megatron's, and set Megatron's globals (tokenizer, timers, writers).

    Raises:
        UsageError: a setting that can't work, one message for the first found.
    """
    check_settings(args)
    for problem in missing_files(args):
        raise UsageError(problem)
    check_datasets(args)
    with megatrons_refusals():
        if args.use_checkpoint_args:
            from megatron.training.checkpointing import load_args_from_checkpoint

            check_before_start(args)  # Megatron would end with status 0
            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
        validate_args(args)
        _check_transformer_engine(args)
        set_global_variables(args)


def check_settings(args: argparse.Namespace) -> None:
    """Our own checks, which look at nothing but the arguments.

    Raises:
        UsageError: a setting that can't work.
    """
    check_mock_arguments(args)
    _check_layout(args)
    _check_data(args)
    check_modes(args)
    _check_expert_bias(args)
    check_experts_apart(args)
    _check_query_norm(args)


@contextmanager
def megatrons_refusals() -> Iterator[None]:
    """What Megatron's checks raise becomes one line for the user.

    Raises:
        UsageError: with Megatron's reason.
    """
    try:
        yield
    except (AssertionError, ValueError, FileNotFoundError, NotImplementedError, RuntimeError, ImportError) as error:
        raise UsageError(f"Megatron refuses the arguments: {reason_of(error)}") from error


def _check_layout(args: argparse.Namespace) -> None:
    model_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if args.world_size % model_size != 0:
        raise UsageError(
            f"the number of ranks must be a multiple of tensor x pipeline x context parallel size = {model_size}; "
            f"there are {args.world_size}. Start another number of ranks or change the parallel sizes."
        )
    expert_size = args.expert_model_parallel_size
    if expert_size == 1:
        return
    if not args.num_experts:
        raise UsageError(
            f"--expert-model-parallel-size {expert_size} needs a Mixture-of-Experts model: pass --num-experts."
        )
    if args.num_experts % expert_size != 0:
        raise UsageError(
            f"--num-experts must be a multiple of --expert-model-parallel-size; got {args.num_experts} experts on "
            f"{expert_size} expert-parallel ranks. Change one of them."
        )
    expert_tensor_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ranks_per_stage = args.world_size // args.pipeline_model_parallel_size
    if ranks_per_stage % (expert_size * expert_tensor_size) != 0:
        raise UsageError(
            f"--expert-model-parallel-size {expert_size} x expert tensor parallel size {expert_tensor_size} must "
            f"divide the ranks of a pipeline stage; there are {args.world_size} ranks, {ranks_per_stage} per stage."
        )


def _check_expert_bias(args: argparse.Namespace) -> None:
    expert_tensor_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    alone = args.expert_model_parallel_size * expert_tensor_size == 1
    if args.num_experts and alone and args.add_bias_linear and args.transformer_impl == "local":
        raise UsageError(
            "Megatron's local experts can't add their bias without expert parallelism (it writes into a view): pass "
            "--disable-bias-linear, or --expert-model-parallel-size of at least 2."
        )
    if args.num_experts and args.moe_shared_expert_intermediate_size and args.add_bias_linear:
        raise UsageError("Megatron's shared experts have no bias: pass --disable-bias-linear.")


def _check_transformer_engine(args: argparse.Namespace) -> None:
    if args.transformer_impl == "transformer_engine" and not HAVE_TE:
        raise UsageError(
            "--transformer-impl transformer_engine, Megatron's default, needs Transformer Engine, which is not "
            "installed. Pass --transformer-impl local, which the overlap needs, too, or install it for stock modules."
        )


def _check_query_norm(args: argparse.Namespace) -> None:
    latent = args.multi_latent_attention and args.q_lora_rank is None
    if latent and args.qk_layernorm and args.transformer_impl == "local":
        raise UsageError(
            "--qk-layernorm with --multi-latent-attention has no query norm in Megatron's local modules unless queries "
            "are compressed, too: pass --q-lora-rank, drop --qk-layernorm, or use Transformer Engine with "
            "--lancet-plan off."
        )


def _check_data(args: argparse.Namespace) -> None:
    named = (
        *(args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path),
        *(args.data_args_path, args.per_split_data_args_path),
    )
    if not any(named) and not args.mock_data:
        raise UsageError("no data: pass --data-path PREFIX (see tools/preprocess_data.py) or --mock-data.")
    if args.eval_interval is None:
        raise UsageError("--eval-interval is missing: Megatron plans its validation samples by it.")


def check_modes(args: argparse.Namespace) -> None:
    """
    Raises:
        UsageError: the run is to do something else than pretrain a GPT model on plain text, or asks for it in words
            that Megatron has retired.
    """
    for flag, given, now in (
        ("--checkpoint-activations", args.checkpoint_activations, "--recompute-granularity"),
        ("--model-parallel-size", args.model_parallel_size is not None, "--tensor-model-parallel-size"),
    ):
        if given:
            raise UsageError(f"Megatron has retired {flag}: pass {now}.")
    modes = {
        "--sft": args.sft,
        "--fim-data": args.fim_data,
        "--hybrid-context-parallel": args.hybrid_context_parallel,
        "--dataloader-inter-document-masking": args.dataloader_inter_document_masking,
        "--perform-rl-step": args.perform_rl_step,
        "--hybrid-layer-pattern": args.hybrid_layer_pattern is not None,
        "--hybrid-override-pattern": args.hybrid_override_pattern is not None,
        "--is-hybrid-model": args.is_hybrid_model,
        "--logits-save-dir": args.logits_save_dir is not None,
        "--logits-load-dir": args.logits_load_dir is not None,
        "--yaml-cfg": args.yaml_cfg is not None,
        "--per-dataset-sequences-path": args.per_dataset_sequences_path is not None,
    }
    for flag, given in modes.items():
        if given:
            raise UsageError(f"{flag} is not supported by pretrain_gpt_moe.py: it pretrains GPT on plain text.")
    if args.spec is not None and tuple(args.spec) == OWN_SPEC:
        raise UsageError(
            f"--spec {' '.join(OWN_SPEC)} is for Megatron's own pretrain_gpt.py: pretrain_gpt_moe.py needs no --spec. "
            "Drop it."
        )

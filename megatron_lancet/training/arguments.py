"""Parses and validates the command line: Megatron's parser with our flags, and one line for each error."""

import argparse
import dataclasses
import difflib
import functools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.training.arguments import add_megatron_arguments, parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from megatron_lancet import __version__
from megatron_lancet.config import OWN_SPEC, LancetConfig
from megatron_lancet.data.hugging_face import HUGGING_FACE_TYPE, tokenizer_source
from megatron_lancet.dry_run_flags import DryRunConfig
from megatron_lancet.errors import UsageError, reason_of
from megatron_lancet.feature import Feature
from megatron_lancet.flags import flags_of
from megatron_lancet.training.flag_conflicts import check_flag_conflicts
from megatron_lancet.training.input_files import check_datasets, check_tokenizer, missing_files
from megatron_lancet.training.layer_pattern import check_hybrid_pattern
from megatron_lancet.training.megatron.cluster_patches import any_number_of_connections, no_list_of_arguments
from megatron_lancet.training.plan.support import may_overlap, refuse_other_tasks


class _OwnHelp(argparse.Action):
    """Prints the flags of one group: ``--help`` lists all of Megatron's, four thousand lines."""

    def __init__(self, option_strings: Sequence[str], dest: str, group: argparse._ArgumentGroup, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)
        self._group = group

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        formatter = parser._get_formatter()
        formatter.start_section(f"{self._group.title} ({self._group.description})")
        formatter.add_arguments(self._group._group_actions)
        formatter.end_section()
        parser._print_message(formatter.format_help(), sys.stdout)
        parser.exit()


def add_lancet_arguments(parser: argparse.ArgumentParser, features: Sequence[Feature] = ()) -> argparse.ArgumentParser:
    """Adds the ``--lancet-*`` flags to Megatron's parser and makes its errors short.

    Args:
        features: those whose flags the parser takes.
    """
    group = parser.add_argument_group("Megatron-Lancet", "hide the all-to-all of expert parallelism")
    group.add_argument("--version", action="version", version=f"megatron-lancet {__version__}")
    group.add_argument(
        "--lancet-help", action=_OwnHelp, group=group, help="list the flags of Megatron-Lancet, and exit"
    )
    add_config_arguments(group, LancetConfig)
    add_config_arguments(group, DryRunConfig)
    _add_feature_arguments(group, features)
    for feature in features:
        feature.change_parser(parser)
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    for action in parser._actions:
        # Some of Megatron's help texts have bare percent signs, with which argparse fails at --help.
        action.help = action.help and re.sub(r"(%%|%\(\w+\)s)|%", lambda found: found[1] or "%%", action.help)
    return parser


def _add_feature_arguments(group: argparse._ArgumentGroup, features: Sequence[Feature]) -> None:
    for feature in features:
        if feature.flags is not None:
            add_config_arguments(group, feature.flags)


def add_config_arguments(group: argparse._ArgumentGroup, config_class: type) -> None:
    """Adds the flags of a dataclass of ``config.py``.

    Megatron's ``ArgumentGroupFactory`` does not fit: it names flags after the bare fields, some of which are names of
    Megatron's own arguments, spells enumerations by their member names, and can't infer unions.
    """
    for name, entry, flag in flags_of(config_class):
        settings: dict[str, Any] = {"help": flag.help.format(default=entry.default)}
        if flag.parsed_as is bool:
            settings["action"] = "store_true"
        else:
            default = flag.none_word if entry.default is None else entry.default
            settings |= {"default": default.value if isinstance(default, Enum) else default, "metavar": flag.metavar}
            settings |= {"choices": flag.choices} if flag.choices else {"type": flag.parsed_as}
        group.add_argument(name, **settings)


def config_of[Config](config_class: type[Config], args: argparse.Namespace) -> Config:
    """The dataclass of flags that parsed arguments give."""
    values: dict[str, Any] = {}
    for name, entry, flag in flags_of(config_class):
        values[entry.name] = flag.value_of(getattr(args, name.removeprefix("--").replace("-", "_")))
    return config_class(**values)


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Fails like argparse, without the usage text of a thousand flags, and suggests the flag with the closest name."""
    hints = []
    for word in message.replace(":", " ").split():
        if word.startswith("--") and word not in parser._option_string_actions:
            close = difflib.get_close_matches(word, parser._option_string_actions, n=1)
            hints += [f" {word}: did you mean {close[0]}?"] if close else []
    raise UsageError(f"{message}.{''.join(hints)} pretrain_gpt_moe.py --help lists all flags.")


def parse(features: Sequence[Feature] = ()) -> tuple[argparse.Namespace, LancetConfig]:
    """Parses ``sys.argv`` with Megatron's parser; does not validate settings against each other.

    Args:
        features: the optional features of the run.

    Raises:
        UsageError: an unknown flag or a value that a flag does not take.
    """
    args = parse_args(functools.partial(add_lancet_arguments, features=features))
    is_dry_run = config_of(DryRunConfig, args).dry_run
    config = with_features(args, features)
    if not is_dry_run:
        _check_plan_file(config)
    return args, config


def default_arguments() -> argparse.Namespace:
    """Megatron's arguments without a command line."""
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])


def with_features(args: argparse.Namespace, features: Sequence[Feature]) -> LancetConfig:
    """The settings that parsed arguments give, features included.

    Raises:
        UsageError: a value is outside the range of its flag.
    """
    kinds = [feature.flags for feature in features if feature.flags is not None]
    settings = {kind: config_of(kind, args) for kind in kinds}
    return dataclasses.replace(config_of(LancetConfig, args), features=tuple(features), settings=settings)


def config_from_words(words: Sequence[str], features: Sequence[Feature] = ()) -> LancetConfig:
    """Parses ``--lancet-*`` flags for a program that has a command line of its own.

    Args:
        features: the optional features of the run.

    Raises:
        UsageError: an unknown flag or a value that a flag does not take.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    group = parser.add_argument_group()
    add_config_arguments(group, LancetConfig)
    _add_feature_arguments(group, features)
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    config = with_features(parser.parse_args(words), features)
    _check_plan_file(config)
    return config


def _check_plan_file(config: LancetConfig) -> None:
    if isinstance(config.plan, Path) and not config.plan.is_file():
        raise UsageError(f"--lancet-plan expects auto, off or a plan file; there is no file {config.plan}.")


def take_checkpoint_arguments(args: argparse.Namespace, config: LancetConfig) -> None:
    """Takes the arguments that ``--use-checkpoint-args`` takes from a checkpoint. Call before all checks of settings.

    Raises:
        UsageError: there is no checkpoint, or Megatron can't read it.
    """
    if not args.use_checkpoint_args:
        return
    _check_inputs(args, config)  # without a checkpoint Megatron would end with status 0
    with megatrons_refusals():
        load_checkpoint_arguments(args)


def load_checkpoint_arguments(args: argparse.Namespace) -> None:
    """Loads the arguments of the checkpoints that ``args`` names."""
    from megatron.training.checkpointing import load_args_from_checkpoint

    load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    load_args_from_checkpoint(args)


def validate(args: argparse.Namespace, config: LancetConfig) -> None:
    """Runs our checks, then Megatron's, and sets Megatron's globals (tokenizer, timers, writers).

    Raises:
        UsageError: a setting can't work; the message describes the first one found.
    """
    check_settings(args, config)
    for problem in missing_files(args):
        raise UsageError(problem)
    check_tokenizer(args)
    check_datasets(args)
    with megatrons_refusals():
        run_megatrons_checks(args, config)
        if args.transformer_impl == "transformer_engine" and not HAVE_TE:
            raise UsageError(
                "--transformer-impl transformer_engine, Megatron's default, needs Transformer Engine, which is not "
                "installed. Install it, or pass --transformer-impl local."
            )
        if args.tokenizer_type == HUGGING_FACE_TYPE:
            tokenizer_source(args.tokenizer_model)
        set_global_variables(args)
    _check_inputs(args, config)


def _check_inputs(args: argparse.Namespace, config: LancetConfig) -> None:
    for feature in config.features:
        feature.check_inputs(args)


def run_megatrons_checks(args: argparse.Namespace, config: LancetConfig) -> None:
    """Runs Megatron's validation. A run with a plan may have any number of CUDA's connections.

    Megatron then prints all arguments: only with ``--lancet-verbose``.

    Raises:
        UsageError: a setting can't work for a reason that Megatron does not say.
    """
    check_flag_conflicts(args)
    with (
        nullcontext() if config.verbose else no_list_of_arguments(),
        any_number_of_connections() if may_overlap(args, config) else nullcontext(),
    ):
        validate_args(args)


def check_settings(args: argparse.Namespace, config: LancetConfig) -> None:
    """Runs our own checks, which need the arguments only.

    Raises:
        UsageError: a setting can't work.
    """
    for feature in config.features:
        feature.check_arguments(args, config)
    _check_layout(args)
    check_hybrid_pattern(args)
    _check_data(args)
    check_modes(args)
    _check_local_modules(args)


@contextmanager
def megatrons_refusals() -> Iterator[None]:
    """Converts the errors of Megatron's checks to one line for the user.

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
        raise UsageError(f"--expert-model-parallel-size {expert_size} needs experts: pass --num-experts.")
    if args.num_experts % expert_size != 0:
        raise UsageError(
            f"--num-experts must be a multiple of --expert-model-parallel-size; got {args.num_experts} experts on "
            f"{expert_size} expert-parallel ranks. Change one of them."
        )
    expert_tensor_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts_size = expert_size * expert_tensor_size * args.pipeline_model_parallel_size
    if args.world_size % experts_size != 0:
        raise UsageError(
            f"--expert-model-parallel-size {expert_size} x expert tensor parallel size {expert_tensor_size} must "
            f"divide the ranks of a pipeline stage; there are {args.world_size} ranks. Start a multiple of "
            f"{math.lcm(model_size, experts_size)} ranks."
        )


def _check_local_modules(args: argparse.Namespace) -> None:
    """Refuses settings with which Megatron's own modules fail while they are built or run."""
    is_local = args.transformer_impl == "local"
    expert_tensor_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    not_parallel = args.expert_model_parallel_size * expert_tensor_size == 1
    if args.num_experts and not_parallel and args.add_bias_linear and is_local:
        raise UsageError(
            "Megatron's local experts can't add their bias without expert parallelism (it writes into a view): pass "
            "--disable-bias-linear, or --expert-model-parallel-size of at least 2."
        )
    if args.num_experts and args.moe_shared_expert_intermediate_size and args.add_bias_linear:
        raise UsageError("Megatron's shared experts have no bias: pass --disable-bias-linear.")
    for flag, is_set in {"--qk-clip": args.qk_clip, "--log-max-attention-logit": args.log_max_attention_logit}.items():
        if is_set and is_local:
            raise UsageError(
                f"{flag} reads the largest logits of Transformer Engine's attention, but --transformer-impl is local, "
                "as on every CPU without Transformer Engine. Drop the flag, or pass --transformer-impl "
                "transformer_engine."
            )
    if args.multi_latent_attention and args.q_lora_rank is None and args.qk_layernorm and is_local:
        raise UsageError(
            "--qk-layernorm with --multi-latent-attention has no query norm in Megatron's local modules unless queries "
            "are also compressed: pass --q-lora-rank, drop --qk-layernorm, or use Transformer Engine."
        )


def _check_data(args: argparse.Namespace) -> None:
    named = [getattr(args, f"{part}data_path") for part in ("", "train_", "valid_", "test_")]
    if not any((*named, args.data_args_path, args.per_split_data_args_path, args.mock_data)):
        raise UsageError("no data: pass --data-path PREFIX (see lancet data encode) or --mock-data.")
    if args.eval_interval is None:
        raise UsageError("--eval-interval is missing: Megatron plans its validation samples by it.")


def check_modes(args: argparse.Namespace) -> None:
    """Refuses runs that do something else than pretrain a model on plain text.

    Raises:
        UsageError: a flag is for another task, is retired, or names our own layer specification.
    """
    refuse_other_tasks(args)
    if args.spec is not None and tuple(args.spec) == OWN_SPEC:
        raise UsageError(
            f"--spec {' '.join(OWN_SPEC)} is for Megatron's own pretrain_gpt.py: pretrain_gpt_moe.py needs no --spec. "
            "Drop it."
        )

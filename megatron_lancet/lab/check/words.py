"""A command line of Megatron as flags with their values, by the parser's own sections."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.training.arguments import add_megatron_arguments

from megatron_lancet.config import LancetConfig
from megatron_lancet.lab.launch.flag_file import split_flags
from megatron_lancet.registry import features
from megatron_lancet.training.arguments import add_lancet_arguments, with_features

_OVERLAP_SECTION = "Megatron-Lancet"


@dataclass(frozen=True)
class CommandLine:
    """Flags of a run, in their order, each with its words.

    Attributes:
        args: Megatron's arguments, parsed and not validated.
        config: the run's settings.
        sections: title of the parser's section of each flag that is given.
    """

    flags: tuple[tuple[str, ...], ...]
    args: argparse.Namespace
    config: LancetConfig
    sections: dict[str, str]

    def kept(self, sections: Iterable[str], flags: Iterable[str]) -> list[str]:
        """The words without the flags of these sections, without these flags, and without flags of the overlap."""
        dropped_sections, dropped = {*sections, _OVERLAP_SECTION}, set(flags)
        kept = [flag for flag in self.flags if self.sections[flag[0]] not in dropped_sections]
        return [word for flag in kept if flag[0] not in dropped for word in flag]

    def overlap_words(self, dropped: Iterable[str]) -> list[str]:
        """The words of the flags of the overlap, without these."""
        unwanted = set(dropped)
        own = [flag for flag in self.flags if self.sections[flag[0]] == _OVERLAP_SECTION and flag[0] not in unwanted]
        return [word for flag in own for word in flag]


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Reads the flags of a run.

    Raises:
        UsageError: Megatron's parser does not take them.
    """
    parser = add_lancet_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), features())
    args = parser.parse_args(list(words))
    titles = {
        option: str(group.title)
        for group in parser._action_groups
        for action in group._group_actions
        for option in action.option_strings
    }
    flags = tuple(split_flags(words))
    return CommandLine(
        flags, args, with_features(args, features()), {flag[0]: titles.get(flag[0], "") for flag in flags}
    )

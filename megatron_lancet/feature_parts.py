"""Types that the core and its optional features exchange: obstacles to a plan, other samples, small launches."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class PlanPart(StrEnum):
    """A part of a plan that not every run can have."""

    PAIRING = "pairing"
    TILES = "tiles"
    CUDA_GRAPHS = "cuda_graphs"


@dataclass(frozen=True)
class PlanBlocker:
    """Why a run can't have a part of a plan.

    Attributes:
        reason: a clause.
        advice: what to do about it, as an imperative.
    """

    reason: str
    advice: str

    @property
    def advice_begins(self) -> str:
        """The advice with a capital letter, to start a sentence."""
        return self.advice[0].upper() + self.advice[1:]


@dataclass(frozen=True)
class Samples:
    """Samples that do not come from Megatron's GPT data sets; their sizes differ.

    Attributes:
        dataset: class of Megatron's that reads them.
        num_samples: samples of a micro-batch.
        num_positions: positions of a sample, at most.
        number_set_by: what sets the number of samples, for messages.
    """

    dataset: type
    num_samples: int
    num_positions: int
    number_set_by: str


type ReadBatch = Callable[[Any, Any], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Reads the next micro-batch of a data iterator for a model: its tensors by Megatron's names, and further inputs."""


@dataclass
class SmallLaunch:
    """A launch that is checked on a few CPU ranks; features change it in place.

    Attributes:
        args: Megatron's arguments of the launch.
        axes: ranks of each parallel axis of the check, by name.
        keeps_kernels: whether kernels that also run on a CPU stay what they are.
        anew: flags of the launch that are left out, because ``flags`` has them with another value or they do not work.
        flags: further flags of both runs, stock's and the overlap's.
        ours: further flags of the overlap.
        stock_mask: whether stock gets a mask in place of ``ours``.
        left_out: beginnings of flags that are not checked, by the part of the launch that they stand for.
        changes: what is different from the launch, for the user.
    """

    args: argparse.Namespace
    axes: Mapping[str, int]
    keeps_kernels: bool
    left_out: dict[str, str]
    anew: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    stock_mask: bool = False
    changes: list[str] = field(default_factory=list)

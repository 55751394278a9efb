"""What a dry run finds out, as data for its report."""

import argparse
from dataclasses import dataclass, field

from megatron_lancet.training.dry_run.layout import Layout
from megatron_lancet.training.dry_run.memory import Memory
from megatron_lancet.training.dry_run.parameters import ModelSize
from megatron_lancet.training.dry_run.stages import PipelineStage


@dataclass
class Findings:
    """Results of a dry run.

    Attributes:
        target: for which machines, and where the number of ranks comes from.
        stages: of the pipeline.
        memory: of a rank of each stage.
        plan: lines about it.
        changes: settings of the script that the run changes, a line for each.
        warnings: what may be wrong, or only missing here.
    """

    args: argparse.Namespace
    target: str
    layout: Layout
    stages: list[PipelineStage]
    size: ModelSize
    memory: list[Memory]
    plan: list[str]
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

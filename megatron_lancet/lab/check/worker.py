"""One rank of a run of a check: one training step of Megatron, whose loss, gradients and norm are written down."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lancet.lab.check.samples import datasets_of
from megatron_lancet.lab.check.state import (
    keep_gradients_as_weights,
    load_full,
    save_full,
    save_shards,
    spread_weights,
)
from megatron_lancet.patching import replaced
from megatron_lancet.registry import features
from megatron_lancet.training import job
from megatron_lancet.training.megatron.patches import padding_mask_of_losses, taken_train_step
from megatron_lancet.training.platform.detect import platform
from megatron_lancet.training.process.exit import RankStatus

type Prepare = Callable[[], AbstractContextManager[None]]


_OUR_BLOCK = "megatron_lancet.model.transformer_block"
"""Module whose block runs the layers where a plan does; stock's layers may have our core attention."""


@dataclass(frozen=True)
class Task:
    """The work of the ranks of a run.

    Attributes:
        words: the command line.
        weights: file of the initial weights; a run on one rank writes it if it is not there.
        folder: for the result of each rank.
        seed: of the samples.
        padding: whether samples have padding, which Megatron's routers mask.
        documents: whether samples are made of documents, which do not attend to each other.
        prepare: context for the run, for tests that change Megatron; None outside of tests.
    """

    words: tuple[str, ...]
    weights: Path
    folder: Path
    seed: int = 1
    padding: bool = False
    documents: bool = False
    prepare: Prepare | None = None


def run_task(task: Task) -> None:
    """Trains one step by ``task``, in the environment of a rank.

    Raises:
        UsageError: the run is refused.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(sys, "argv", ["pretrain_gpt_moe.py", *task.words]))
        found = stack.enter_context(platform())
        if task.prepare is not None:
            stack.enter_context(task.prepare())
        stack.enter_context(taken_train_step(lambda step, model: _take(task, step, model)))
        if task.padding:
            stack.enter_context(padding_mask_of_losses())
        job.run_job(
            found.device, RankStatus(), datasets_of(task.seed, task.padding, task.documents), features=features()
        )


def _take(task: Task, step: Callable[[], Any], model: Any) -> Any:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if task.weights.exists():
        load_full(model, task.weights)
    else:
        assert num_ranks == 1, "a reference on one rank writes the weights first"
        spread_weights(model)
        save_full(model, task.weights)
    result = step()
    losses, grad_norm = result[0], result[5]
    keep_gradients_as_weights(model)
    save_shards(model, task.folder / f"shards.{rank}")
    modules = {type(part).__module__ for stage in model for part in stage.modules()}
    found = {
        "losses": {name: float(value) for name, value in losses.items()},
        "grad_norm": float(grad_norm),
        "overlaps": _OUR_BLOCK in modules,
    }
    (task.folder / f"result.{rank}.json").write_text(json.dumps(found))
    return result

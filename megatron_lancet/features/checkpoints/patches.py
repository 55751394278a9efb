"""Changes to Megatron's loading, saving and stopping."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import distrib_optimizer
from megatron.training import checkpointing, training

from megatron_lancet.checkpoint.files import TRACKER
from megatron_lancet.features.checkpoints.publish import INCOMPLETE, writing_tracker
from megatron_lancet.features.checkpoints.queue_process import live_as_long_as
from megatron_lancet.patching import around
from megatron_lancet.training.megatron.patches import training_loop_hooks


@contextmanager
def watched_checkpoints(
    load: Callable[[Callable[[], Any]], Any],
    save: Callable[[int, Callable[[], Any], bool], Any],
    failed_to_write: Callable[[Exception], None],
) -> Iterator[None]:
    """Calls ``load`` and ``save`` where Megatron loads and saves a checkpoint.

    Args:
        load: receives Megatron's function, without parameters, and calls it.
        save: receives the step as well, and whether the checkpoint is a persistent one.
        failed_to_write: receives the error with which this rank failed to write its part; Megatron keeps only its
            class.
    """

    def load_checkpoint(stock: Any, *args: Any, **kwargs: Any) -> Any:
        return load(lambda: stock(*args, **kwargs))

    def save_checkpoint(stock: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        with _written_under_another_name(iteration):
            is_persistent = not kwargs.get("non_persistent_ckpt", False)
            return save(iteration, lambda: stock(iteration, *args, **kwargs), is_persistent)

    def write_preloaded_data(stock: Any, *args: Any, **kwargs: Any) -> Any:
        written = stock(*args, **kwargs)
        if written is not None and isinstance(written[1], Exception):
            failed_to_write(written[1])
        return written

    with (
        around(FileSystemWriterAsync, "write_preloaded_data", write_preloaded_data),
        around(training, "load_checkpoint", load_checkpoint),
        around(training, "save_checkpoint", save_checkpoint),
        _recorded_under_final_name(),
        around(checkpointing.maybe_msc, "open", _open_tracker_atomically),
    ):
        yield


def _written_under_another_name(step: int) -> AbstractContextManager[None]:
    """Inside the context a checkpoint of ``step`` is written into a folder named ``incomplete_...``."""

    def get_checkpoint_name(stock: Any, checkpoints_path: str, iteration: int, *args: Any, **kwargs: Any) -> str:
        name: str = stock(checkpoints_path, iteration, *args, **kwargs)
        if iteration != step or "://" in str(checkpoints_path):
            return name
        folder, below = Path(checkpoints_path), Path(name).relative_to(checkpoints_path)
        return str(folder / f"{INCOMPLETE}{below.parts[0]}" / Path(*below.parts[1:]))

    return around(checkpointing, "get_checkpoint_name", get_checkpoint_name)


@contextmanager
def _recorded_under_final_name() -> Iterator[None]:
    """Calls Weights & Biases, on the last rank, when rank 0 has renamed the checkpoint: it records an existing path."""
    recordings: list[Callable[[], Any]] = []

    def record() -> None:
        while recordings:
            recordings.pop(0)()

    def record_after_rank_0() -> None:
        dist.barrier()
        record()

    def on_save_checkpoint_success(stock: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        final = checkpoint_path.replace(f"{INCOMPLETE}iter_", "iter_")  # the folder, or a file below it
        recordings.append(lambda: stock(final, *args, **kwargs))

    def schedule_async_save(stock: Any, async_request: Any) -> Any:
        async_request.add_finalize_fn(record_after_rank_0)
        return stock(async_request)

    def save_checkpoint(stock: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)  # ends with a barrier, unless it is asynchronous
        record()
        return result

    with (
        around(checkpointing.wandb_utils, "on_save_checkpoint_success", on_save_checkpoint_success),
        around(checkpointing, "schedule_async_save", schedule_async_save),
        around(training, "save_checkpoint", save_checkpoint),
    ):
        yield


def _open_tracker_atomically(stock: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """When Megatron writes the tracker file, renames the checkpoint to its final name and replaces the file at once."""
    if mode == "w" and Path(file).name == TRACKER and "://" not in str(file):
        return writing_tracker(Path(file))
    return stock(file, mode, *args, **kwargs)


@contextmanager
def asked_to_stop(handler: Any, begin: Callable[[], None]) -> Iterator[None]:
    """Makes Megatron ask ``handler`` after each step whether to save and exit, instead of its own signal handler.

    Args:
        handler: object whose ``signals_received()`` is called on all ranks and returns which ranks were asked to stop.
        begin: called when the training loop begins.
    """
    with around(training, "get_signal_handler", lambda stock: handler), training_loop_hooks(before=begin):
        yield


def queue_lives_with_the_rank() -> AbstractContextManager[None]:
    """Makes the process that serves Megatron's queue during a save end with its rank, and not before."""

    def get_write_results_queue(stock: Any, mp_mode: str = "spawn") -> Any:
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(live_as_long_as, (os.getpid(),))
            filesystem_async._results_queue = manager.Queue()
        return stock(mp_mode)

    return around(filesystem_async, "get_write_results_queue", get_write_results_queue)


@contextmanager
def resumable_distributed_optimizer() -> Iterator[None]:
    """Lets the distributed optimizer resume fp32 parameters, and with torch's Adam, where there is no apex or TE.

    Stock copies into fp32 parameters, which require gradients, with autograd on. With torch's Adam it also reads the
    step count from optimizer state that does not exist yet, and overwrites torch's per-parameter step counters, one
    tensor that all share, by the tensors of before loading. The saved count survives in the parameter groups. Fully
    reshardable state has no such counters, and stock looks for them.
    """
    has_torch_adam = not distrib_optimizer.HAVE_APEX_OR_TE

    def state_dict(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_torch_adam:
            _make_adam_state(self.optimizer)
        return stock(self, *args, **kwargs)

    def load_state_dict(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = stock(self, *args, **kwargs)
        for group in self.optimizer.param_groups if has_torch_adam else ():
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))
        return result

    def set_parameter(stock: Any, self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        return stock(self, model_param, {"step": None, **tensors} if has_torch_adam else tensors)

    optimizer = distrib_optimizer.DistributedOptimizer
    with (
        around(optimizer, "state_dict", state_dict),
        around(optimizer, "load_state_dict", load_state_dict),
        around(optimizer, "_set_main_param_and_optimizer_states", set_parameter),
    ):
        yield


def _make_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that torch's Adam would create in its first step, unless some state exists."""
    if optimizer.state or not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

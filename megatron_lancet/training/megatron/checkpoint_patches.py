"""What we assume of Megatron's saving, loading and stopping, and what we change there; see ``patches.py``."""

import functools
import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.training import checkpointing, training

from megatron_lancet.patching import wrapped
from megatron_lancet.training.checkpoint.files import INCOMPLETE, TRACKER, writing_tracker
from megatron_lancet.training.process.queue_process import live_as_long_as

SEAMS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (training, "load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler")),
    (training, "save_checkpoint", ("iteration", "model", "optimizer", "non_persistent_ckpt")),
    (filesystem_async, "get_write_results_queue", ("mp_mode",)),
    (FileSystemWriterAsync, "write_preloaded_data", ()),
    (checkpointing.wandb_utils, "on_save_checkpoint_success", ("checkpoint_path",)),
    (checkpointing, "get_checkpoint_name", ("checkpoints_path", "iteration", "release")),
    (checkpointing, "check_checkpoint_args", ("checkpoint_args",)),
    (checkpointing, "_load_base_checkpoint", ("load_dir", "args", "rank0")),
)
"""Functions that we call or wrap, with the parameters that we count on."""


def tracker_is_written_where_expected() -> bool:
    """Whether Megatron opens the tracker file as :func:`watched_checkpoints` expects."""
    return "maybe_msc.open(tracker_filename, 'w')" in inspect.getsource(checkpointing.save_checkpoint)


def checkpoint_arguments(look: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls ``look`` with the arguments that a checkpoint was saved with, when Megatron resumes from one."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
            result = stock(checkpoint_args, *args, **kwargs)
            look(checkpoint_args)
            return result

        return check_checkpoint_args

    return wrapped(checkpointing, "check_checkpoint_args", wrap)


@contextmanager
def watched_checkpoints(
    load: Callable[[Callable[[], Any]], Any],
    save: Callable[[int, Callable[[], Any]], Any],
    failed_to_write: Callable[[Exception], None],
) -> Iterator[None]:
    """Calls ``load`` and ``save`` where Megatron loads and saves a checkpoint; they call what they are given.

    Args:
        save: gets the step, too.
        failed_to_write: gets what went wrong when this rank wrote its part; Megatron goes on with its class alone.
    """

    def watched_load(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            return load(lambda: stock(*args, **kwargs))

        return load_checkpoint

    def watched_save(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
            with _written_under_another_name(iteration):
                return save(iteration, lambda: stock(iteration, *args, **kwargs))

        return save_checkpoint

    def watched_write(stock: Callable[..., Any]) -> Any:
        @functools.wraps(stock)
        def write_preloaded_data(*args: Any, **kwargs: Any) -> Any:
            written = stock(*args, **kwargs)
            if written is not None and isinstance(written[1], Exception):
                failed_to_write(written[1])
            return written

        return staticmethod(write_preloaded_data)

    with (
        wrapped(FileSystemWriterAsync, "write_preloaded_data", watched_write),
        wrapped(training, "load_checkpoint", watched_load),
        wrapped(training, "save_checkpoint", watched_save),
        wrapped(checkpointing.wandb_utils, "on_save_checkpoint_success", _told_the_final_name),
        _published_by_tracker(),
    ):
        yield


def _written_under_another_name(step: int) -> AbstractContextManager[None]:
    """Inside the context a checkpoint of ``step`` goes into a folder whose name says that it is incomplete."""

    def wrap(stock: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(stock)
        def get_checkpoint_name(checkpoints_path: str, iteration: int, *args: Any, **kwargs: Any) -> str:
            name = stock(checkpoints_path, iteration, *args, **kwargs)
            if iteration != step or "://" in str(checkpoints_path):
                return name
            folder, below = Path(checkpoints_path), Path(name).relative_to(checkpoints_path)
            return str(folder / f"{INCOMPLETE}{below.parts[0]}" / Path(*below.parts[1:]))

        return get_checkpoint_name

    return wrapped(checkpointing, "get_checkpoint_name", wrap)


def _told_the_final_name(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Weights & Biases keeps the path of a checkpoint."""

    @functools.wraps(stock)
    def on_save_checkpoint_success(checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(checkpoint_path)
        return stock(str(path.with_name(path.name.removeprefix(INCOMPLETE))), *args, **kwargs)

    return on_save_checkpoint_success


def _published_by_tracker() -> AbstractContextManager[None]:
    """When Megatron writes the tracker file, the checkpoint gets its name, and the file changes at once."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode == "w" and Path(file).name == TRACKER and "://" not in str(file):
                return writing_tracker(Path(file))
            return stock(file, mode, *args, **kwargs)

        return open_file

    return wrapped(checkpointing.maybe_msc, "open", wrap)


@contextmanager
def asked_to_stop(handler: Any, begin: Callable[[], None]) -> Iterator[None]:
    """Lets ``handler`` say after each step whether to save and end, in place of Megatron's signal handler.

    Args:
        handler: its ``signals_received()`` is called on all ranks, and returns whether the ranks were asked.
        begin: called when the loop begins.
    """

    def announced(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def train(*args: Any, **kwargs: Any) -> Any:
            begin()
            return stock(*args, **kwargs)

        return train

    with wrapped(training, "get_signal_handler", lambda stock: lambda: handler), wrapped(training, "train", announced):
        yield


def queue_lives_with_the_rank() -> AbstractContextManager[None]:
    """Makes the process that Megatron keeps for a queue while it saves end with its rank, and not before."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def get_write_results_queue(mp_mode: str = "spawn") -> Any:
            if filesystem_async._results_queue is None:
                manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
                manager.start(live_as_long_as, (os.getpid(),))
                filesystem_async._results_queue = manager.Queue()
            return stock(mp_mode)

        return get_write_results_queue

    return wrapped(filesystem_async, "get_write_results_queue", wrap)


def arguments_before_loading(look: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Calls ``look`` with the arguments that a checkpoint was saved with, before any weight or optimizer is loaded."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def load_base_checkpoint(load_dir: Any, args: Any, rank0: bool = False, **kwargs: Any) -> Any:
            result = stock(load_dir, args, rank0=rank0, **kwargs)
            if rank0 and result[0] is not None and result[0].get("args") is not None:
                look(result[0]["args"])
            return result

        return load_base_checkpoint

    return wrapped(checkpointing, "_load_base_checkpoint", wrap)

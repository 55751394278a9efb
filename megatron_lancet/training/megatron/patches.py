"""Changes to Megatron that every run needs, and hooks around its training steps and its training loop.

Each change is a context: it holds while training runs and is undone afterwards. Only this folder, and a few features
for themselves, change Megatron: ``checkpoint_patches.py`` shows the arguments of a checkpoint, ``cpu_patches.py`` and
``mock_patches.py`` change the machine, ``cluster_patches.py`` what validation sees, ``virtual_gpu_patches.py`` a GPU.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from megatron.core.datasets import utils as dataset_utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import token_dispatcher
from megatron.training import training

from megatron_lancet.model.attention.sdpa import SdpaAttention
from megatron_lancet.model.recompute import make_checkpoint
from megatron_lancet.patching import around, raised_by, replaced
from megatron_lancet.runtime.comm_stats import CommStats
from megatron_lancet.training.megatron.norm import sequence_parallel_norm

type StepHook = Callable[[Callable[[], Any]], Any]
"""Receives a training step, runs it once and returns its result; does its own work before and after."""


def sequence_parallel_with_torch_norm() -> AbstractContextManager[None]:
    """Lets the norm of the local spec run under sequence parallelism, where stock refuses it without apex."""

    def new(stock: Any, cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        if config.sequence_parallel:
            return sequence_parallel_norm(config, hidden_size, eps)
        return stock(cls, config, hidden_size, eps, **kwargs)

    return around(torch_norm.WrappedTorchNorm, "__new__", new)


def dataset_helpers_of_the_wheel() -> AbstractContextManager[None]:
    """Keeps Megatron from running make where its package has no Makefile: a wheel has the compiled helpers."""
    has_makefile = Path(dataset_utils.__file__).with_name("Makefile").exists()
    return nullcontext() if has_makefile else around(dataset_utils, "compile_helpers", lambda stock: None)


def dropped_outputs() -> AbstractContextManager[None]:
    """Lets the block's layers drop the outputs that ``--recompute-modules`` names, see ``model/recompute.py``."""
    return around(tensor_parallel, "CheckpointWithoutOutput", make_checkpoint)


def fused_core_attention(needed: bool) -> AbstractContextManager[None]:
    """Makes the local spec build torch's fused attention if it is requested or Megatron's own lacks a feature."""
    if not needed:
        return nullcontext()
    return around(LocalSpecProvider, "core_attention", lambda stock, self: SdpaAttention)


@contextmanager
def measured_stock_communication(stats: CommStats) -> Iterator[None]:
    """Times stock's all-to-alls of experts and count exchanges; their arguments and results pass through.

    An asynchronous message counts by its wait alone. Messages in a CUDA graph are not timed.
    """

    def is_captured() -> bool:
        return stats.on_cuda and torch.cuda.is_current_stream_capturing()

    def all_to_all_single(stock: Any, *args: Any, **kwargs: Any) -> Any:
        experts = parallel_state.get_expert_model_parallel_group(check_initialized=False)
        if experts is None or kwargs.get("group") is not experts or is_captured():
            return stock(*args, **kwargs)
        stats.add("num_all_to_alls", 1)
        if kwargs.get("async_op"):
            return _TimedWork(stock(*args, **kwargs), stats)
        with stats.waiting("exposed_ms", "all_to_all_ms"):
            return stock(*args, **kwargs)

    def gather(stock: Any, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_.is_floating_point() or is_captured():  # rows, gathered over the tensor-parallel group
            return stock(input_, *args, **kwargs)
        with stats.waiting("counts_exposed_ms"):
            return stock(input_, *args, **kwargs)

    with (
        around(torch.distributed, "all_to_all_single", all_to_all_single),
        around(token_dispatcher, "gather_from_sequence_parallel_region", gather),
    ):
        yield


class _TimedWork:
    """A message in flight, whose wait is timed."""

    def __init__(self, work: Any, stats: CommStats) -> None:
        self._work = work
        self._stats = stats

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the message."""
        with self._stats.waiting("exposed_ms", "all_to_all_ms"):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def train_step_hooks(hooks: Sequence[StepHook]) -> AbstractContextManager[None]:
    """Runs each of Megatron's training steps inside ``hooks``.

    Args:
        hooks: the outermost one first: it begins before all others and ends after them. The last one runs Megatron's
            step itself.
    """

    def train_step(stock: Any, *args: Any, **kwargs: Any) -> Any:
        step = functools.partial(stock, *args, **kwargs)
        for hook in reversed(hooks):
            step = functools.partial(hook, step)
        return step()

    return around(training, "train_step", train_step)


def taken_train_step(take: Callable[[Callable[[], Any], Any], Any]) -> AbstractContextManager[None]:
    """Lets ``take`` run each training step: it receives the step and the stages of the model; returns the result."""

    def train_step(stock: Any, forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return take(functools.partial(stock, forward_step, data_iterator, model, *args, **kwargs), model)

    return around(training, "train_step", train_step)


def padding_mask_of_losses() -> AbstractContextManager[None]:
    """Tells routers which tokens are padding: those that do not count in the loss. Without pipeline stages only."""

    def forward(stock: Any, self: Any, *args: Any, loss_mask: torch.Tensor, **kwargs: Any) -> Any:
        return stock(self, *args, loss_mask=loss_mask, padding_mask=loss_mask == 0, **kwargs)

    return around(GPTModel, "forward", forward)


def training_loop_hooks(
    *, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> AbstractContextManager[None]:
    """Calls ``before`` when Megatron's training loop begins and ``after`` when it has ended.

    ``after`` is called also when an exit condition of Megatron ends the process, but not after another exit or failure.
    """

    def train(stock: Any, *args: Any, **kwargs: Any) -> Any:
        before()
        try:
            result = stock(*args, **kwargs)
        except SystemExit as request:
            if request.code is not None and raised_by(request, stock):  # a step may exit on this rank alone
                after()
            raise
        after()
        return result

    return around(training, "train", train)


@contextmanager
def schedule_hooks(is_trained: Callable[[Any], bool], hooks: Sequence[StepHook]) -> Iterator[None]:
    """Runs each step of a foreign training loop inside ``hooks``: a call of a schedule, without ``forward_only``.

    Args:
        is_trained: whether steps of a model, or of a list of stages, count.
    """

    def run(stock: Any, *args: Any, **kwargs: Any) -> Any:
        step = functools.partial(stock, *args, **kwargs)
        if kwargs.get("forward_only", False) or not is_trained(kwargs["model"]):
            return step()
        for hook in reversed(hooks):
            step = functools.partial(hook, step)
        return step()

    with (
        around(schedules, "forward_backward_no_pipelining", run),
        around(schedules, "forward_backward_pipelining_without_interleaving", run),
        around(schedules, "forward_backward_pipelining_with_interleaving", run),
    ):
        yield


def micro_batch_calculator(calculator: Any) -> AbstractContextManager[None]:
    """Gives Megatron a calculator of micro-batches, where the program has set up none."""
    return replaced(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)


def around_ddp(wrap: Callable[[Callable[[], None], Any, Any], None]) -> AbstractContextManager[None]:
    """Calls ``wrap`` in place of DDP's constructor, with the rest of that call, the module, and DDP's configuration."""
    signature = inspect.signature(DistributedDataParallel.__init__)

    def init(stock: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        wrap(functools.partial(stock, *args, **kwargs), given["module"], given["ddp_config"])

    return around(DistributedDataParallel, "__init__", init)


def late_weight_grads(is_prepared: Callable[[Any], bool] = lambda module: True) -> AbstractContextManager[None]:
    """Makes DDP expect weight gradients of prepared modules after autograd is done, where its settings are not ours."""

    def wrap(build: Callable[[], None], module: Any, ddp_config: Any) -> None:
        if is_prepared(module):
            ddp_config.delay_wgrad_compute = True
        build()

    return around_ddp(wrap)

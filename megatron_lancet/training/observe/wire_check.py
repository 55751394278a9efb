"""Measures in one step of a run how far a narrow wire moves its gradients, and leaves the run as it is without.

In that step Megatron's forward and backward passes run twice on the same weights and micro-batches: first with hidden
states as they are, then in the format of ``--lancet-wire``. What the first pass changed is put back before the second,
and the optimizer gets the gradients of the second.
"""

import argparse
import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_lancet.report.wire_error import KINDS, WireError, kind_of_parameter
from megatron_lancet.training.megatron.patches import unvalidated_results
from megatron_lancet.training.observe.step_recorder import StepRecorder
from megatron_lancet.training.overlap_setup import OverlapSetup
from megatron_lancet.training.process.console import say
from megatron_lancet.training.tuning.controller import NUM_TUNING_WARM_UP_STEPS

_WITH_STATE_OF_THEIR_OWN = {
    "fp8": "the scales of low-precision layers would see the step twice",
    "fp4": "the scales of low-precision layers would see the step twice",
    "qk_clip": "the largest attention logits would be those of both passes",
    "log_max_attention_logit": "the largest attention logits would be those of both passes",
}
"""Megatron's arguments with which a second pass would leave traces, and why. Others that keep what passes leave behind,
such as ``--save-dgrads-interval``, and CUDA graphs do not work with the overlapping block at all."""
_PIECE = 1 << 24
"""Gradients that are compared at a time, so that the comparison takes little memory."""


class WireCheck:
    """Checks one step of a run, and holds what was found.

    It is the first one behind the warm-up of the run's final plan: reductions then have their final order. Its time and
    messages are recorded without those of the first pass. On all ranks it is the same step.

    Attributes:
        found: the error, the same on all ranks; until then why there is none.
    """

    def __init__(
        self, args: argparse.Namespace, setup: OverlapSetup, recorder: StepRecorder, is_settled: Callable[[], bool]
    ) -> None:
        """
        Args:
            is_settled: returns whether the run has its final plan; the same on all ranks.
        """
        self._args = args
        self._setup = setup
        self._recorder = recorder
        self._is_settled = is_settled
        self._is_over = False
        self.found = WireError(setup.wire, why_not="the run ended before a step could be checked")

    def forward_backward(self, run: Callable[..., Any], **call: Any) -> Any:
        """Runs the forward and backward passes of a training step, twice if it is the one to check.

        Args:
            run: Megatron's function.
            call: its arguments.
        """
        if self._is_over or not self._is_turn():
            return run(**call)
        self._is_over = True
        why_not = why_not_checked(self._args, call["model"])
        if why_not is not None:
            self._report(WireError(self._setup.wire, why_not=why_not))
            return run(**call)
        stages: Sequence[DistributedDataParallel] = call["model"]
        recorded = RecordedData(call["data_iterator"])
        state = StepState(stages)
        exact = self._recorder.leave_out(lambda: self._exact_gradients(run, {**call, "data_iterator": recorded.whole}))
        for stage in stages:
            stage.zero_grad_buffer()
        state.restore()
        recorded.rewind()
        result = run(**{**call, "data_iterator": recorded.whole})
        self._report(self._compared(stages, exact))
        return result

    def _is_turn(self) -> bool:
        is_traced = self._setup.stages[0].decoder.comm.trace is not None
        return not is_traced and self._is_settled() and self._recorder.num_steps >= NUM_TUNING_WARM_UP_STEPS - 1

    def _exact_gradients(self, run: Callable[..., Any], call: Mapping[str, Any]) -> list[torch.Tensor]:
        """The gradients of each bucket on this rank, on the host: a device may have no room for a second copy."""
        with self._setup.exact_wire(), unvalidated_results():
            self._setup.check_step(lambda: run(**call))
        return [part.to("cpu", copy=True) for stage in call["model"] for part, _, _ in _reduced_parts(stage)]

    def _compared(self, stages: Sequence[DistributedDataParallel], exact: Sequence[torch.Tensor]) -> WireError:
        """Collective over all ranks."""
        name_of = {parameter: name for stage in stages for name, parameter in stage.module.named_parameters()}
        squares = torch.zeros(len(KINDS), 2, dtype=torch.float64)
        parts = [found for stage in stages for found in _reduced_parts(stage)]
        for (part, ranges, num_copies), of_exact in zip(parts, exact, strict=True):
            for parameter, (start, end) in ranges.items():
                if not _is_counted(parameter):
                    continue
                kind = KINDS.index(kind_of_parameter(name_of[parameter]))
                squares[kind] += _squares(part[start:end], of_exact[start:end]) / num_copies
        squares = squares.to(next(stages[0].parameters()).device)
        dist.all_reduce(squares)
        by_kind = {
            kind: (error / whole) ** 0.5 for kind, (error, whole) in zip(KINDS, squares.tolist(), strict=True) if whole
        }
        error, whole = squares.sum(dim=0).tolist()
        step = self._recorder.num_done + 1
        if not whole or not math.isfinite(error + whole):
            values = "finite" if whole else "above 0"
            return WireError(self._setup.wire, why_not=f"the gradients of step {step} are not {values}")
        return WireError(self._setup.wire, step, (error / whole) ** 0.5, by_kind)

    def _report(self, found: WireError) -> None:
        self.found = found
        if dist.get_rank() == 0:
            say(f"Megatron-Lancet {found.as_text()}")


def why_not_checked(args: argparse.Namespace, model: Sequence[DistributedDataParallel]) -> str | None:
    """Why a step of this run can't be run twice without a trace, as the end of a sentence; None if it can.

    Args:
        args: Megatron's arguments.
        model: the wrapped pipeline stages of this rank.
    """
    for name, why in _WITH_STATE_OF_THEIR_OWN.items():
        if getattr(args, name, None):
            return f"with --{name.replace('_', '-')} {why}"
    if any(stage.ddp_config.overlap_param_gather and not stage.ddp_config.use_distributed_optimizer for stage in model):
        return "with --overlap-param-gather and no --use-distributed-optimizer gradient buffers also hold parameters"
    return None


class RecordedData:
    """Micro-batches that are kept when they are first asked for, and come again after :meth:`rewind`.

    Attributes:
        whole: takes the place of Megatron's data iterator: None, one, or one for each virtual stage.
    """

    def __init__(self, data_iterator: Any) -> None:
        """
        Args:
            data_iterator: of Megatron's step.
        """
        self._by_id: dict[int, _Replay] = {}
        self.whole: Any = (
            [self._replay(part) for part in data_iterator]
            if isinstance(data_iterator, list)
            else self._replay(data_iterator)
        )

    def rewind(self) -> None:
        """Begins again with the first micro-batch."""
        for replay in self._by_id.values():
            replay.position = 0

    def _replay(self, iterator: Any) -> "_Replay | None":
        return None if iterator is None else self._by_id.setdefault(id(iterator), _Replay(iterator))


class _Replay(Iterator[Any]):
    """An iterator whose items come again from ``position`` on."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._kept: list[Any] = []
        self.position = 0

    def __next__(self) -> Any:
        if self.position == len(self._kept):
            self._kept.append(next(self._items))
        self.position += 1
        return copy.copy(self._kept[self.position - 1])  # a step may take entries out of the dict


class StepState:
    """What forward and backward passes change beside gradients: random states, buffers of modules, logged losses."""

    def __init__(self, stages: Sequence[torch.nn.Module]) -> None:
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
        # With --te-rng-tracker the states are generators, which advance on each draw.
        self._tracked = {name: _state_of(one) for name, one in tracked.items()}
        modules = [module for stage in stages for module in stage.modules()]
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        # Auxiliary losses are summed over the micro-batches of a step and of those before it that were not logged.
        self._metrics = {name: entry.values.clone() for name, entry in get_moe_metrics_tracker().metrics.items()}
        logged = MTPLossLoggingHelper.tracker
        self._mtp = {key: value.clone() if torch.is_tensor(value) else value for key, value in logged.items()}

    def restore(self) -> None:
        """Puts everything back."""
        of_python, of_numpy, of_torch = self._random
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device)
        self._restore_tracked()
        with torch.no_grad():
            for module, name, buffer, values in self._buffers:
                buffer.copy_(values)
                module._buffers[name] = buffer
        metrics = get_moe_metrics_tracker().metrics
        for name in list(metrics):
            if name not in self._metrics:
                del metrics[name]
            else:
                metrics[name].values.copy_(self._metrics[name])
        MTPLossLoggingHelper.tracker.clear()
        MTPLossLoggingHelper.tracker.update(self._mtp)

    def _restore_tracked(self) -> None:
        tracker = tensor_parallel.get_cuda_rng_tracker()
        states = tracker.get_states()
        for name, saved in self._tracked.items():
            if isinstance(states[name], torch.Generator):
                states[name].set_state(saved)
            else:
                states[name] = saved
        if states:
            tracker.set_states(states)


def _state_of(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _reduced_parts(
    stage: DistributedDataParallel,
) -> Iterator[tuple[torch.Tensor, dict[torch.nn.Parameter, tuple[int, int]], int]]:
    """What this rank's optimizer reads of each bucket [n], each parameter's range, and how many ranks have the same."""
    for group in stage.bucket_groups + stage.expert_parallel_bucket_groups:
        if group.ddp_config.use_distributed_optimizer:
            ranks = group.intra_distributed_optimizer_instance_group
            num_shards, shard = ranks.size(), ranks.rank()
            num_copies = group.ddp_config.num_distributed_optimizer_instances
        else:
            num_shards, shard, num_copies = 1, 0, group.data_parallel_group.size()
        for bucket in group.buckets:
            size = bucket.grad_data.numel() // num_shards
            first = shard * size
            ranges = {
                parameter: (max(start - first, 0), min(end - first, size))
                for parameter, (start, end) in bucket.param_to_index.items()
                if start - first < size and end > first
            }
            yield bucket.grad_data[first : first + size], ranges, num_copies


def _is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether no other rank of the model counts the same gradient."""
    return param_is_not_shared(parameter) and tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter)


def _squares(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Sums of squares of the difference and of the exact gradients [n], the latter on the host: [2]."""
    sums = torch.zeros(2, dtype=torch.float64, device=found.device)
    for ours, reference in zip(found.split(_PIECE), exact.split(_PIECE), strict=True):
        wanted = reference.to(found.device).double()
        sums += torch.stack(((ours.double() - wanted).square().sum(), wanted.square().sum()))
    return sums.cpu()

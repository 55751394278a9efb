"""Megatron's schedules of micro-batches for plans with pairing: each backward paired with the next forward.

Megatron has two such schedules, without pipeline parallelism and with virtual pipeline stages, for its own
``--overlap-moe-expert-parallel-comm``. They call one function each for a forward and a backward that belong together.
Ours take their place: they run Megatron's own ``forward_step`` on the forward lane and its ``backward_step`` here.
All around them stays Megatron's: when gradients are reduced, the messages between stages, and one micro-batch more in
flight. A pipeline without virtual stages has no such function.
"""

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import is_pp_last_stage, is_vp_last_stage

from megatron_lancet.features.pairing.pairing import MicroBatch, Pairing
from megatron_lancet.model.gpt import LanguageModel, num_forward_waits
from megatron_lancet.patching import around


@contextmanager
def paired_schedules(stages: Callable[[], Sequence[LanguageModel]]) -> Iterator[None]:
    """Inside the context steps by a plan with pairing run in pairs, see :meth:`Pairing.run_by`.

    Args:
        stages: returns the pipeline stages of this rank, which run a plan.
    """
    interleaved = _Interleaved(stages)

    def without_pipeline(stock: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], torch.Tensor]:
        return _run_without_pipeline(stages()[0], _bound(stock, args, kwargs))

    def with_virtual_stages(stock: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return interleaved.run(_bound(stock, args, kwargs))

    with (
        around(schedules, "combined_1f1b_schedule_for_no_pipelining", without_pipeline),
        around(schedules, "combined_1f1b_schedule_for_interleaved_pipelining", with_virtual_stages),
    ):
        yield


def _bound(stock: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a call by the names of Megatron's parameters, which ``seams.py`` checks."""
    call = inspect.signature(stock).bind(*args, **kwargs)
    call.apply_defaults()
    return SimpleNamespace(**call.arguments)


@contextmanager
def _ended_on_failure(pairing: Pairing) -> Iterator[None]:
    """Ends the forwards under way if the step fails."""
    try:
        yield
    except BaseException:
        pairing.end()
        raise


def _run_without_pipeline(stage: LanguageModel, call: SimpleNamespace) -> tuple[list[Any], torch.Tensor]:
    """A step without pipeline parallelism.

    Args:
        call: arguments of Megatron's function.

    Returns:
        What Megatron's function does: the data of all losses, and the number of tokens.
    """
    assert not call.forward_only
    pairing = stage.decoder.comm.progress
    last = call.num_microbatches - 1
    num_tokens_of_step = call.total_num_tokens

    def add(index: int) -> MicroBatch:
        forward = partial(
            schedules.forward_step,
            call.forward_step_func,
            call.data_iterator,
            call.model,
            call.num_microbatches,
            call.input_tensor,
            call.forward_data_store,
            call.config,
            parallel_state.get_context_parallel_world_size(),
            call.collect_non_loss_data,
            is_first_microbatch=call.check_first_val_step(index == 0),
            current_microbatch=index,
        )
        at_end = index in (0, last)
        return pairing.add(forward, index + 1, at_end, num_forward_waits(stage, at_end))

    pairing.begin_step()
    with _ended_on_failure(pairing), pairing.on_one_core(last > 0):
        present = add(0)
        output_tensor, num_tokens = pairing.finish(present)
        with call.no_sync_func():
            beside = add(1) if last else None
            for index in range(last):
                assert beside is not None
                num_tokens_of_step += num_tokens
                following = add(index + 2) if index + 2 <= last else None
                with pairing.backward(present, beside, following):
                    schedules.backward_step(call.input_tensor, output_tensor, call.output_tensor_grad, call.config)
                    del output_tensor  # the graph ends here, as in Megatron's own loop
                output_tensor, num_tokens = pairing.finish(beside)
                present, beside = beside, following
        num_tokens_of_step += num_tokens
        with pairing.backward(present):
            schedules.backward_step(call.input_tensor, output_tensor, call.output_tensor_grad, call.config)
    return call.forward_data_store, num_tokens_of_step


class _Interleaved:
    """Steps of a pipeline with virtual stages: Megatron calls :meth:`run` for each forward, backward or pair of both.

    Forwards of the warm-up and backwards of the cool-down have no partner.
    """

    def __init__(self, stages: Callable[[], Sequence[LanguageModel]]) -> None:
        self._stages = stages
        # Micro-batches between their forward and their backward, by stage; both come in the same order.
        self._open: defaultdict[int, deque[MicroBatch]] = defaultdict(deque)

    def run(self, call: SimpleNamespace) -> tuple[Any, Any]:
        """A forward, a backward, or a pair of both.

        Args:
            call: arguments of Megatron's function.

        Returns:
            What Megatron's function does: the forward's output and the gradient of the backward's input.
        """
        pairing = self._stages()[0].decoder.comm.progress
        has_forward, has_backward = call.f_virtual_microbatch_id is not None, call.b_virtual_microbatch_id is not None
        if call.f_virtual_microbatch_id == 0:
            self._open.clear()
            pairing.begin_step()
        if has_forward and call.pre_forward is not None:
            call.pre_forward()
        if has_backward and call.pre_backward is not None:
            call.pre_backward()
        output_tensor = input_tensor_grad = num_tokens = added = None
        stage = call.get_model_chunk_id(call.f_virtual_microbatch_id, forward=True) if has_forward else None
        with _ended_on_failure(pairing), pairing.on_one_core(has_forward and has_backward):
            if stage is not None:
                added = self._add(pairing, stage, call)
            if has_backward:
                input_tensor_grad = self._run_backward(pairing, added, call)
            if added is not None and stage is not None:
                output_tensor, num_tokens = pairing.finish(added)
                self._open[stage].append(added)
        if has_forward:
            call.forward_step_helper_postprocess(stage, output_tensor, num_tokens)
            if call.post_forward is not None:
                output_tensor = call.post_forward(output_tensor)
        if has_backward:
            call.backward_step_helper_postprocess(call.b_virtual_microbatch_id)
            if call.post_backward is not None:
                input_tensor_grad = call.post_backward(input_tensor_grad)
        return output_tensor, input_tensor_grad

    def _add(self, pairing: Pairing, stage: int, call: SimpleNamespace) -> MicroBatch:
        """Queues the forward of a call.

        Args:
            stage: index of the virtual stage.
        """
        forward_id = call.f_virtual_microbatch_id
        number = call.get_microbatch_id_in_model_chunk(forward_id, forward=True)
        forward = partial(
            schedules.forward_step,
            call.forward_step_func,
            call.data_iterator[stage],
            call.model[stage],
            call.num_microbatches,
            call.forward_step_helper_preprocess(forward_id, stage, number),
            call.forward_data_store,
            call.config,
            parallel_state.get_context_parallel_world_size(),
            call.collect_non_loss_data,
            is_first_microbatch=call.check_first_val_step(call.is_first_microbatch_for_model_chunk(forward_id)),
            current_microbatch=number,
            vp_stage=stage,
            is_last_stage=_is_last_stage(stage, call.config),
        )
        num_ids = call.num_microbatches * len(call.model)
        order = _Order(num_ids, call.get_microbatch_id_in_model_chunk, call.get_model_chunk_id)
        at_end = order.is_at_end(forward_id, call.b_virtual_microbatch_id)
        return pairing.add(forward, number + 1, at_end, num_forward_waits(self._stages()[stage], at_end))

    def _run_backward(self, pairing: Pairing, beside: MicroBatch | None, call: SimpleNamespace) -> Any:
        """Runs the backward of a call during a forward, if there is one; the gradient of its input."""
        stage = call.get_model_chunk_id(call.b_virtual_microbatch_id, forward=False)
        tensors = call.backward_step_helper_preprocess(call.b_virtual_microbatch_id, stage)
        with pairing.backward(self._open[stage].popleft(), beside):
            return schedules.backward_step(*tensors, call.config)


@dataclass(frozen=True)
class _Order:
    """The order of a step's forwards and backwards on a rank with virtual stages, by Megatron's numbers for them.

    Attributes:
        num_ids: number of micro-batches of all its stages.
        microbatch_of: returns the micro-batch of the forward with a number.
        stage_of: returns the stage of the forward, or of the backward, with a number.
    """

    num_ids: int
    microbatch_of: Callable[..., int]
    stage_of: Callable[..., int]

    def is_at_end(self, forward_id: int, backward_id: int | None) -> bool:
        """Whether a forward, or its own backward, has no partner.

        Args:
            backward_id: number of the backward paired with the forward; None if there is none.
        """
        if backward_id is None:
            return True
        num_without_partner = forward_id - backward_id
        return self._own_backward(forward_id) >= self.num_ids - num_without_partner

    def _own_backward(self, forward_id: int) -> int:
        """Number of the backward of a forward: they follow the same table, with the stages in the opposite order."""
        own = self.microbatch_of(forward_id, forward=True), self.stage_of(forward_id, forward=True)
        numbers = range(self.num_ids)
        return next(n for n in numbers if (self.microbatch_of(n, forward=True), self.stage_of(n, forward=False)) == own)


def _is_last_stage(stage: int, config: Any) -> bool:
    """Whether a virtual stage of this rank is the model's last."""
    group = parallel_state.get_pipeline_model_parallel_group()
    is_last: bool = is_vp_last_stage(stage, config.virtual_pipeline_model_parallel_size) and is_pp_last_stage(group)
    return is_last

"""Megatron's schedules of micro-batches for plans with pairing: each backward beside the next forward.

Megatron has two such schedules, without pipeline parallelism and with virtual pipeline stages, for its own
``--overlap-moe-expert-parallel-comm``. They call one function each for a forward and a backward that belong together.
Ours take their place: they run Megatron's own ``forward_step`` on the forward lane and its ``backward_step`` here.
All around them stays Megatron's: when gradients are reduced, the messages between stages, and one micro-batch more in
flight. A pipeline without virtual stages has no such function.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import is_pp_last_stage, is_vp_last_stage

from megatron_lancet.model.gpt import LanguageModel, num_forward_waits
from megatron_lancet.patching import around
from megatron_lancet.runtime.pairing import MicroBatch, Pairing

WITHOUT_PIPELINE = "combined_1f1b_schedule_for_no_pipelining"
WITH_VIRTUAL_STAGES = "combined_1f1b_schedule_for_interleaved_pipelining"
ASKED_BY = "overlap_moe_expert_parallel_comm"
"""Field of Megatron's configuration of a model that selects these schedules. Our layers do not read it."""


def ask_for_pairs(stages: Sequence[LanguageModel], is_paired: bool) -> None:
    """Makes Megatron run the next steps by the schedules for pairs, or by those without them.

    Megatron validates the field when it makes the configuration; its conditions are those of its own overlap.

    Args:
        stages: the pipeline stages of this rank.
    """
    for stage in stages:
        setattr(stage.config, ASKED_BY, is_paired)


@contextmanager
def paired_schedules(stages: Callable[[], Sequence[LanguageModel]]) -> Iterator[None]:
    """Inside the context steps for which :func:`ask_for_pairs` asks run in pairs.

    Args:
        stages: returns the pipeline stages of this rank, which run a plan.
    """
    interleaved = Interleaved(stages)
    with (
        around(schedules, WITHOUT_PIPELINE, lambda stock, *args: without_pipeline(stages()[0], *args)),
        around(schedules, WITH_VIRTUAL_STAGES, lambda stock, *args, **kwargs: interleaved.run(*args, **kwargs)),
    ):
        yield


@contextmanager
def _ended_on_failure(pairing: Pairing) -> Iterator[None]:
    """Ends the forwards under way if the step fails."""
    try:
        yield
    except BaseException:
        pairing.end()
        raise


def without_pipeline(
    stage: LanguageModel,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    input_tensor: None,
    output_tensor_grad: None,
    forward_data_store: list[Any],
    config: Any,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    forward_only: bool,
    no_sync_func: Callable[[], AbstractContextManager[Any]],
    total_num_tokens: torch.Tensor,
    check_first_val_step: Callable[[bool], bool],
) -> tuple[list[Any], torch.Tensor]:
    """A step without pipeline parallelism; arguments and result are those of Megatron's function."""
    assert not forward_only
    pairing = stage.decoder.comm.pairing
    last = num_microbatches - 1

    def add(index: int) -> MicroBatch:
        is_first = check_first_val_step(index == 0)
        forward = partial(
            schedules.forward_step,
            forward_step_func,
            data_iterator,
            model,
            num_microbatches,
            input_tensor,
            forward_data_store,
            config,
            parallel_state.get_context_parallel_world_size(),
            collect_non_loss_data,
            is_first_microbatch=is_first,
            current_microbatch=index,
        )
        at_end = index in (0, last)
        return pairing.add(forward, index + 1, at_end, num_forward_waits(stage, at_end))

    with _ended_on_failure(pairing):
        present = add(0)
        output_tensor, num_tokens = pairing.finish(present)
        with no_sync_func():
            beside = add(1) if last else None
            for index in range(last):
                assert beside is not None
                total_num_tokens += num_tokens
                following = add(index + 2) if index + 2 <= last else None
                with pairing.backward(present, beside, following):
                    schedules.backward_step(input_tensor, output_tensor, output_tensor_grad, config)
                    del output_tensor  # the graph ends here, as in Megatron's own loop
                output_tensor, num_tokens = pairing.finish(beside)
                present, beside = beside, following
        total_num_tokens += num_tokens
        with pairing.backward(present):
            schedules.backward_step(input_tensor, output_tensor, output_tensor_grad, config)
    return forward_data_store, total_num_tokens


class Interleaved:
    """Steps of a pipeline with virtual stages: Megatron calls :meth:`run` for each forward, backward or pair of both.

    Forwards of the warm-up and backwards of the cool-down have no partner.
    """

    def __init__(self, stages: Callable[[], Sequence[LanguageModel]]) -> None:
        self._stages = stages
        # Micro-batches between their forward and their backward, by stage; both come in the same order.
        self._open: defaultdict[int, deque[MicroBatch]] = defaultdict(deque)

    def run(
        self,
        config: Any,
        forward_step_func: Any,
        data_iterator: Sequence[Any],
        model: Sequence[Any],
        num_microbatches: int,
        forward_data_store: list[Any],
        forward_step_helper_preprocess: Callable[[int, int, int], Any],
        forward_step_helper_postprocess: Callable[[int, Any, Any], None],
        backward_step_helper_preprocess: Callable[[int, int], tuple[Any, Any, Any]],
        backward_step_helper_postprocess: Callable[[int], None],
        get_microbatch_id_in_model_chunk: Callable[..., int],
        get_model_chunk_id: Callable[..., int],
        check_first_val_step: Callable[[bool], bool],
        is_first_microbatch_for_model_chunk: Callable[[int], bool],
        collect_non_loss_data: bool,
        f_virtual_microbatch_id: int | None = None,
        b_virtual_microbatch_id: int | None = None,
        pre_forward: Callable[..., None] | None = None,
        pre_backward: Callable[..., None] | None = None,
        post_forward: Callable[..., Any] | None = None,
        post_backward: Callable[..., Any] | None = None,
    ) -> tuple[Any, Any]:
        """A forward, a backward, or a pair of both; arguments and result are those of Megatron's function."""
        pairing = self._stages()[0].decoder.comm.pairing
        forward_id, backward_id = f_virtual_microbatch_id, b_virtual_microbatch_id
        if forward_id == 0:
            self._open.clear()
        if pre_forward is not None and forward_id is not None:
            pre_forward()
        if pre_backward is not None and backward_id is not None:
            pre_backward()
        output_tensor = input_tensor_grad = added = None
        with _ended_on_failure(pairing):
            if forward_id is not None:
                stage = get_model_chunk_id(forward_id, forward=True)
                number = get_microbatch_id_in_model_chunk(forward_id, forward=True)
                forward = partial(
                    schedules.forward_step,
                    forward_step_func,
                    data_iterator[stage],
                    model[stage],
                    num_microbatches,
                    forward_step_helper_preprocess(forward_id, stage, number),
                    forward_data_store,
                    config,
                    parallel_state.get_context_parallel_world_size(),
                    collect_non_loss_data,
                    is_first_microbatch=check_first_val_step(is_first_microbatch_for_model_chunk(forward_id)),
                    current_microbatch=number,
                    vp_stage=stage,
                    is_last_stage=_is_last_stage(stage, config),
                )
                order = _Order(num_microbatches * len(model), get_microbatch_id_in_model_chunk, get_model_chunk_id)
                at_end = order.is_at_end(forward_id, backward_id)
                added = pairing.add(forward, number + 1, at_end, num_forward_waits(self._stages()[stage], at_end))
            if backward_id is not None:
                ended = get_model_chunk_id(backward_id, forward=False)
                tensors = backward_step_helper_preprocess(backward_id, ended)
                with pairing.backward(self._open[ended].popleft(), added):
                    input_tensor_grad = schedules.backward_step(*tensors, config)
                del tensors
            if added is not None:
                output_tensor, num_tokens = pairing.finish(added)
                self._open[stage].append(added)
        if added is not None:
            forward_step_helper_postprocess(stage, output_tensor, num_tokens)
            if post_forward is not None:
                output_tensor = post_forward(output_tensor)
        if backward_id is not None:
            backward_step_helper_postprocess(backward_id)
            if post_backward is not None:
                input_tensor_grad = post_backward(input_tensor_grad)
        return output_tensor, input_tensor_grad


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
            backward_id: number of the backward beside the forward; None if there is none.
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

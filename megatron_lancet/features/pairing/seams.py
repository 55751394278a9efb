"""Which functions and pieces of code of Megatron's schedules pairing uses."""

import inspect

from megatron.core.pipeline_parallel import schedules

from megatron_lancet.features.pairing.pairing import ASKED_BY
from megatron_lancet.training.megatron.seams import Seam, missing_functions

_SEAMS: tuple[Seam, ...] = (
    (schedules, "get_pp_rank_microbatches", (ASKED_BY,)),
    (
        schedules,
        "combined_1f1b_schedule_for_no_pipelining",
        (
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "input_tensor",
            "output_tensor_grad",
            "forward_data_store",
            "config",
            "collect_non_loss_data",
            "forward_only",
            "no_sync_func",
            "total_num_tokens",
            "check_first_val_step",
        ),
    ),
    (
        schedules,
        "combined_1f1b_schedule_for_interleaved_pipelining",
        (
            "config",
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "forward_data_store",
            "forward_step_helper_preprocess",
            "forward_step_helper_postprocess",
            "backward_step_helper_preprocess",
            "backward_step_helper_postprocess",
            "get_microbatch_id_in_model_chunk",
            "get_model_chunk_id",
            "check_first_val_step",
            "is_first_microbatch_for_model_chunk",
            "collect_non_loss_data",
            "f_virtual_microbatch_id",
            "b_virtual_microbatch_id",
            "pre_forward",
            "pre_backward",
            "post_forward",
            "post_backward",
        ),
    ),
)
"""What ``schedules.py`` replaces, with the parameters that it reads."""


def missing_seams() -> list[str]:
    """Names what Megatron lacks of them, and the places at which it does not call the entry points."""
    return [
        *missing_functions(_SEAMS),
        *(
            f"the branch by config.{ASKED_BY} in {schedule.__name__}"
            for schedule in (
                schedules.forward_backward_no_pipelining,
                schedules.forward_backward_pipelining_with_interleaving,
            )
            if f"if config.{ASKED_BY} and not forward_only:" not in inspect.getsource(schedule)
        ),
    ]

"""Which functions and pieces of code of Megatron's loading, saving and stopping are changed."""

import inspect

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import distrib_optimizer
from megatron.training import checkpointing, training

from megatron_lancet.training.megatron.seams import Seam, missing_functions

SEAMS: tuple[Seam, ...] = (
    (distrib_optimizer.DistributedOptimizer, "state_dict", ()),
    (distrib_optimizer.DistributedOptimizer, "load_state_dict", ("state_dict",)),
    (distrib_optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", ("model_param", "tensors")),
    (training, "get_signal_handler", ()),
    (training, "load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler")),
    (training, "save_checkpoint", ("iteration", "model", "optimizer", "non_persistent_ckpt")),
    (filesystem_async, "get_write_results_queue", ("mp_mode",)),
    (FileSystemWriterAsync, "write_preloaded_data", ()),
    (checkpointing.wandb_utils, "on_save_checkpoint_success", ("checkpoint_path",)),
    (checkpointing, "schedule_async_save", ("async_request",)),
    (checkpointing, "get_checkpoint_name", ("checkpoints_path", "iteration", "release")),
)
"""What ``patches.py`` changes, with the parameters that it reads."""


def missing_seams() -> list[str]:
    """Names what Megatron lacks of them."""
    missing = missing_functions(SEAMS)
    if "maybe_msc.open(tracker_filename, 'w')" not in inspect.getsource(checkpointing.save_checkpoint):
        missing.append("the place in checkpointing.save_checkpoint that writes the tracker file")
    return missing

"""From a model's own configuration to the settings that a run reads, which a Megatron script has as arguments."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

from megatron_lancet.config import FLAGS_VARIABLE
from megatron_lancet.errors import UsageError
from megatron_lancet.library.models import device_of
from megatron_lancet.training.arguments import default_arguments
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE

_NO_END = 1 << 40
"""Steps of a training whose length is not known."""
_RENAMED = {"num_experts": "num_moe_experts"}
"""Arguments that are fields of Megatron's configuration by another name."""

_PACKED = f"does not work with packed samples ({FLAGS_VARIABLE} allows them in every run)"
_OFF = f"train without the overlap: plan='off', in {FLAGS_VARIABLE} --lancet-plan off"

_NOT_IN_0_18 = ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards")
"""Arguments that megatron-core 0.18 does not have."""


@dataclass(frozen=True)
class StepShape:
    """What a rank trains on in a step.

    Attributes:
        micro_batch_size: samples of a micro-batch; None if these change.
        seq_length: tokens of a sample, before context parallelism cuts it; None if they change.
        num_micro_batches: micro-batches of a step; None if Megatron's calculator has their number.
        num_steps: steps of the training; None if that is not known.
        has_packed_samples: whether samples are made of documents, whose bounds come as ``packed_seq_params``.
    """

    micro_batch_size: int | None
    seq_length: int | None
    num_micro_batches: int | None
    num_steps: int | None = None
    has_packed_samples: bool = False

    def with_micro_batches(self, number: int) -> "StepShape":
        """Returns the shape with this number of micro-batches."""
        return replace(self, num_micro_batches=number)

    @property
    def changes(self) -> bool:
        """Whether micro-batches have shapes of their own."""
        return self.seq_length is None

    def of_longest(self, model: Any) -> "StepShape":
        """Returns the shape of a micro-batch with a sample of the model's longest, two of them in a step.

        Args:
            model: the language model.
        """
        return replace(self, micro_batch_size=1, seq_length=model.max_sequence_length, num_micro_batches=2)

    def calculator(self) -> ConstantNumMicroBatchesCalculator:
        """Megatron's object that knows the number of micro-batches."""
        assert self.num_micro_batches is not None
        assert self.micro_batch_size is not None
        num_ranks = parallel_state.get_data_parallel_world_size()
        return ConstantNumMicroBatchesCalculator(
            self.micro_batch_size * num_ranks * self.num_micro_batches,
            self.micro_batch_size,
            num_ranks,
            decrease_batch_size_if_needed=False,
            rank=dist.get_rank(),
        )


def check_packed_samples(config: Any, positions: str | None) -> None:
    """
    Args:
        config: Megatron's ``TransformerConfig``.
        positions: the model's ``position_embedding_type``; None if it has none.

    Raises:
        UsageError: the overlap would compute something else for packed samples than Megatron does.
    """
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    losses = [(kinds, coefficients)] if isinstance(kinds, str) else zip(kinds, coefficients, strict=True)
    if any(kind == "seq_aux_loss" and coefficient for kind, coefficient in losses):
        raise UsageError(
            f"moe_router_load_balancing_type seq_aux_loss {_PACKED}: Megatron takes the row of all documents for one "
            f"sequence. Set aux_loss, global_aux_loss or a coefficient of 0, or {_OFF}."
        )
    if positions == "mrope":
        raise UsageError(
            f"position_embedding_type mrope {_PACKED}: the overlap takes a token's rotary embedding by its place in "
            "its document, and mrope has one for each token of a row. Drop packed_samples=True and the packing of "
            f"samples, or {_OFF}."
        )


def run_arguments(
    stages: Sequence[torch.nn.Module], ddp_config: Any, shape: StepShape, timeout_minutes: int
) -> argparse.Namespace:
    """Returns Megatron's arguments for a model that was built without them.

    All that the model's configuration and DDP's have is taken from there; the rest are Megatron's defaults.

    Args:
        stages: this rank's pipeline stages, unwrapped.
        ddp_config: Megatron's ``DistributedDataParallelConfig``.
    """
    model: Any = stages[0]
    config = model.config
    args = default_arguments()
    values = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    values |= {name: values[field] for name, field in _RENAMED.items()}
    on_ddp = {entry.name: getattr(ddp_config, entry.name) for entry in dataclasses.fields(ddp_config)}
    renamed = {"bucket_size": "ddp_bucket_size", "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32"}
    on_ddp |= {name: on_ddp[field] for field, name in renamed.items()}
    for name, value in {
        **dict.fromkeys(_NOT_IN_0_18),
        **on_ddp,
        **values,
        **_of_run(model, shape, timeout_minutes),
    }.items():
        setattr(args, name, value)
    return args


def _of_run(model: Any, shape: StepShape, timeout_minutes: int) -> dict[str, Any]:
    assert shape.num_micro_batches is not None
    assert shape.micro_batch_size is not None
    assert shape.seq_length is not None
    data_ranks = parallel_state.get_data_parallel_world_size()
    # Packed samples of a micro-batch lie end to end, in one row.
    num_rows, row = shape.micro_batch_size, shape.seq_length
    if shape.has_packed_samples:
        num_rows, row = 1, num_rows * row
    return {
        "world_size": dist.get_world_size(),
        "rank": dist.get_rank(),
        "data_parallel_size": data_ranks,
        "micro_batch_size": num_rows,
        "seq_length": row,
        "global_batch_size": num_rows * data_ranks * shape.num_micro_batches,
        "train_iters": _NO_END if shape.num_steps is None else shape.num_steps,
        "curr_iteration": 0,
        "distributed_timeout_minutes": timeout_minutes,
        "distributed_backend": "nccl" if device_of(model).type == "cuda" else "gloo",
        "transformer_impl": TRANSFORMER_ENGINE if _has_te_layers(model) else "local",
        "padded_vocab_size": model.vocab_size,
        "swiglu": model.config.gated_linear_unit,
        "group_query_attention": model.config.num_query_groups != model.config.num_attention_heads,
        "untie_embeddings_and_output_weights": not getattr(model, "share_embeddings_and_output_weights", False),
        "position_embedding_type": getattr(model, "position_embedding_type", "rope"),
        "hybrid_layer_pattern": getattr(model, "hybrid_layer_pattern", None),
        "dataloader_inter_document_masking": shape.has_packed_samples,
        "lancet_packed_samples": shape.has_packed_samples,  # so that refusals do not name a flag
        "spec": None,
    }


def _has_te_layers(model: torch.nn.Module) -> bool:
    """Whether linear layers are Transformer Engine's."""
    if not HAVE_TE:
        return False
    from megatron.core.extensions.transformer_engine import TELinear

    return any(isinstance(module, TELinear) for module in model.modules())

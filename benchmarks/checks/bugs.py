"""Bugs that Megatron had or has, and bugs that the overlap could have, each with a launch that shows it.

Bugs of Megatron that are fixed in the installed version are put back, from their descriptions, into the ranks of the
launch; one rank alone does not have them. Bugs of the overlap are put into its modules, which stock does not run.
#6470 ports the fix of #5916 to another branch of Megatron: the same fault, put back in a different way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

from megatron_lancet.lab.check.worker import Prepare
from megatron_lancet.patching import around

BASE = (
    *("--num-layers", "16", "--hidden-size", "2048", "--num-attention-heads", "16", "--seq-length", "4096"),
    *("--max-position-embeddings", "4096", "--num-experts", "64", "--moe-router-topk", "6", "--swiglu"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "1e-3", "--disable-bias-linear"),
    *("--normalization", "RMSNorm", "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
)


@dataclass(frozen=True)
class Bug:
    """A wrong result of Megatron, or of the overlap.

    Attributes:
        name: issue or pull request of Megatron-LM; of the overlap what it does.
        what: what is wrong.
        flags: of a launch that shows it, behind :data:`BASE`.
        causes: axes and features of which it needs each.
        shown: a part of the name of what differs, as the check calls it.
        prepare: puts it back; None if the installed version has it.
        padding: whether samples need padding.
        is_ours: whether it is one of the overlap: stock is right.
        same_fault_as: name of an earlier bug that computes the same wrong values; empty for a distinct fault.
    """

    name: str
    what: str
    flags: str
    causes: tuple[str, ...]
    shown: str
    prepare: Prepare | None = None
    padding: bool = False
    is_ours: bool = False
    same_fault_as: str = ""


@contextmanager
def dense_ownership_of_experts() -> Iterator[None]:
    """The optimizer does not know the experts' tensor-parallel group, and weights are not marked as parts of others.

    So the norm takes the copies on all but the first dense tensor-parallel rank for duplicates.
    """
    from megatron.core import tensor_parallel

    def is_not_duplicate(stock: Any, param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
        is_expert = not getattr(param, "allreduce", True)
        unmarked = SimpleNamespace(allreduce=False) if is_expert else param
        return bool(stock(unmarked, tp_group=tp_group, expert_tp_group=None))

    with around(tensor_parallel, "param_is_not_tensor_parallel_duplicate", is_not_duplicate):
        yield


@contextmanager
def unmarked_expert_weights() -> Iterator[None]:
    """What marks a weight as an expert's and as a part of a tensor is lost where the optimizer gets it."""
    from megatron.core import tensor_parallel

    def is_not_duplicate(stock: Any, param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
        seen = param if getattr(param, "allreduce", True) else SimpleNamespace()
        return bool(stock(seen, tp_group=tp_group, expert_tp_group=expert_tp_group))

    with around(tensor_parallel, "param_is_not_tensor_parallel_duplicate", is_not_duplicate):
        yield


@contextmanager
def experts_in_dense_buffers() -> Iterator[None]:
    """Without expert parallelism experts' gradients are reduced over the dense data-parallel group."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    def init(stock: Any, self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if parallel_state.get_expert_model_parallel_world_size() == 1:
            for parameter in module.parameters():
                parameter.allreduce = True
        stock(self, config, ddp_config, module, *args, **kwargs)

    with around(DistributedDataParallel, "__init__", init):
        yield


@contextmanager
def experts_scaled_by_another_group() -> Iterator[None]:
    """Experts' gradients are divided by the size of a group that is half as large as the one that shares them."""
    from megatron.core.distributed import DistributedDataParallel

    def init(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        for buffer in self.expert_parallel_buffers:
            for part in (buffer, *buffer.buckets):
                part.gradient_scaling_factor *= 2

    with around(DistributedDataParallel, "__init__", init):
        yield


@contextmanager
def dropped_dw() -> Iterator[None]:
    """Every second dW of the attention's projection, the last chunk's, is lost."""
    from megatron_lancet.runtime.weight_grad_store import WeightGradStore

    number = count()

    def put(stock: Any, self: Any, weights: Any, compute: Any, num_bytes: int) -> None:
        is_lost = "linear_proj" in weights[0].name and next(number) % 2 == 1
        stock(self, weights, (lambda: None) if is_lost else compute, num_bytes)

    with around(WeightGradStore, "put", put):
        yield


@contextmanager
def swapped_combines() -> Iterator[None]:
    """The second chunk of a layer gets the combined rows of the first one, and vice versa."""
    from megatron_lancet.model import transformer_block

    def merge_hidden(stock: Any, parts: Any, segment: Any) -> Any:
        return stock(parts[::-1], segment)

    with around(transformer_block, "merge_hidden", merge_hidden):
        yield


@contextmanager
def missing_wait() -> Iterator[None]:
    """Gradients that come back from the experts' ranks are read before they have arrived: the buffer is still empty.

    The wait itself stays, so that what is read does not depend on the link's speed.
    """
    import torch

    from megatron_lancet.runtime.exchange import Exchange
    from megatron_lancet.schedule.ops import OpKind, Phase

    def wait(stock: Any, self: Any) -> Any:
        received = stock(self)
        is_read_early = (self.op.kind, self.op.phase) == (OpKind.DISPATCH, Phase.INPUT_GRAD)
        return tuple(torch.zeros_like(one) for one in received) if is_read_early else received

    with around(Exchange, "wait", wait):
        yield


_TP_EP = "--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
_TP_EP += "--sequence-parallel"
_PADDED = "--tensor-model-parallel-size 4 --expert-model-parallel-size 4 --sequence-parallel --calculate-per-token-loss"
_LATENT = "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --tensor-model-parallel-size 4"

BUGS = (
    Bug(
        "#7452 (10)",
        "a padding mask's local token count is the group's, and scales the balancing loss",
        _PADDED,
        ("TP", "the routers' balancing loss", "loss per token"),
        "mlp.router.weight",
        padding=True,
    ),
    Bug(
        "local MLA",
        "latent attention of local layers does not sum gradients of the down projection over TP",
        f"{_LATENT} --expert-model-parallel-size 8 --sequence-parallel",
        ("TP", "latent attention"),
        "linear_kv_down_proj.weight",
    ),
    Bug("#5916", "the norm of gradients lacks experts", _TP_EP, ("TP",), "grad norm", unmarked_expert_weights),
    Bug(
        "#5916 (2)",
        "without EP, gradients of experts are shared over the wrong group where ETP is smaller than TP",
        "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel",
        ("TP",),
        "experts.linear_fc",
        experts_in_dense_buffers,
    ),
    Bug(
        "#1628",
        "without EP, gradients of different parts of experts are mixed where ETP is larger than TP",
        "--expert-tensor-parallel-size 4",
        ("ETP",),
        "experts.linear_fc",
        experts_in_dense_buffers,
    ),
    Bug(
        "#6470",
        "the norm takes TP for the owners of experts",
        _TP_EP,
        ("TP",),
        "grad norm",
        dense_ownership_of_experts,
        same_fault_as="#5916",
    ),
    Bug(
        "#7165",
        "gradients of experts are divided by the size of another group",
        "--expert-model-parallel-size 8 --use-distributed-optimizer",
        ("EP",),
        "experts.linear_fc",
        experts_scaled_by_another_group,
    ),
    *(
        Bug(name, what, "--expert-model-parallel-size 8 --lancet-num-chunks 2", (), shown, prepare, is_ours=True)
        for name, what, shown, prepare in (
            ("dropped dW", "the last chunk's weight gradient is forgotten", "linear_proj.weight", dropped_dw),
            ("swapped combine", "chunks get each other's combined rows", "loss", swapped_combines),
            ("missing wait", "gradients are read before they have arrived", "linear_proj.weight", missing_wait),
        )
    ),
)

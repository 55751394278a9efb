"""The bound on the process groups that Megatron makes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core import parallel_state

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import around
from megatron_lancet.training.megatron.seams import EXPERT_GROUPS


def bounded_expert_groups(max_ctas: int | None, is_default: bool = False) -> AbstractContextManager[None]:
    """Lets NCCL's kernels of the expert-parallel groups that Megatron makes inside the context take ``max_ctas`` SMs at
    most.

    Other options of ``--nccl-communicator-config-path`` and ``--high-priority-stream-groups`` stay.

    Args:
        max_ctas: most thread blocks of a kernel, each of which takes an SM; None for NCCL's own choice.
        is_default: the user gave no bound, so a group keeps the bounds of the file.
    """
    if max_ctas is None:
        return nullcontext()

    def options(stock: Any, pg_name: str, nccl_comm_cfgs: dict[str, dict[str, Any]]) -> Any:
        if pg_name not in EXPERT_GROUPS:
            return stock(pg_name, nccl_comm_cfgs)
        given = nccl_comm_cfgs.get(pg_name, {})
        if is_default and ("max_ctas" in given or "min_ctas" in given):
            return stock(pg_name, nccl_comm_cfgs)
        for name, contradicts in (("max_ctas", max_ctas.__ne__), ("min_ctas", max_ctas.__lt__)):
            if name in given and contradicts(given[name]):
                raise UsageError(
                    f"--lancet-comm-sms {max_ctas} contradicts --nccl-communicator-config-path, where {name} of "
                    f"{pg_name} is {given[name]}. Drop one of the two."
                )
        return stock(pg_name, {**nccl_comm_cfgs, pg_name: {**given, "max_ctas": max_ctas}})

    return around(parallel_state, "get_nccl_options", options)

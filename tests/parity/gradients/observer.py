"""What a training step starts on a rank, and in which order."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from megatron_lancet.patching import around, replaced


def tensor_parallel_collectives() -> list[tuple[Any, str]]:
    """Where Megatron and we start collectives of tensor parallelism in the transformer block."""
    from megatron.core.tensor_parallel import mappings

    return [
        (mappings, "_gather_along_first_dim"),
        (mappings, "_reduce_scatter_along_first_dim"),
        (dist, "all_gather_into_tensor"),
        (dist, "reduce_scatter_tensor"),
    ]


class Observer:
    """Records the order of collectives and how often each parameter is reported ready."""

    def __init__(self, stack: ExitStack, *stages) -> None:
        """
        Args:
            stages: models wrapped by DDP. With several of them the names of parameters begin with the stage's number.
        """
        from megatron_lancet.runtime.comm import Comm

        self.collectives: list[str] = []
        self.reports: Counter[str] = Counter()
        for number, ddp in enumerate(stages):
            self._observe(stack, ddp, f"{number} " if len(stages) > 1 else "")
        for start in ("launch", "launch_when_known", "launch_counts"):
            stack.enter_context(around(Comm, start, self._logged_start))
        for owner, name in tensor_parallel_collectives():
            stack.enter_context(around(owner, name, self._logged_tensor_parallel))

    def _observe(self, stack: ExitStack, ddp, stage: str) -> None:
        names = {p: stage + n.removeprefix("module.") for n, p in ddp.module.named_parameters()}
        for i, group in enumerate(ddp.bucket_groups + ddp.expert_parallel_bucket_groups):
            text = f"reduce {stage}{i}"
            stack.enter_context(replaced(group, "start_grad_sync", self._logged(group.start_grad_sync, text)))
            stack.enter_context(replaced(group, "register_grad_ready", self._counted(group, names)))

    def _logged_tensor_parallel(self, stock, *args, **kwargs):
        group = kwargs.get("group") or args[1]
        if group.size() > 1:
            self.collectives.append(stock.__name__)
        return stock(*args, **kwargs)

    def _logged(self, function, text: str):
        def call(*args, **kwargs):
            self.collectives.append(text)
            return function(*args, **kwargs)

        return call

    def _counted(self, group, names):
        original = group.register_grad_ready

        def call(param, *args):
            if group.is_last_microbatch:
                self.reports[names[param]] += 1
            return original(param, *args)

        return call

    def _logged_start(self, stock, comm, op, *args):
        self.collectives.append(str(op))
        return stock(comm, op, *args)

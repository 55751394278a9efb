"""Where a rank runs: on a CUDA device over NCCL, or on the CPU over gloo."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.gpu.check.rank.watchdog import Watchdog
from megatron_lancet.training.platform.cpu import cpu_platform

_TIMEOUT = timedelta(minutes=5)
"""Of collectives; the watchdog ends a rank earlier."""


class RankPlace:
    """A rank, seen from itself, with the process groups of Megatron.

    Attributes:
        device: of all tensors.
        keeps_order: whether all ranks launch their messages in one order. gloo's have a connection for each sender, and
            leave when their counts are known.
    """

    def __init__(self, device: torch.device, watchdog: Watchdog) -> None:
        self.device = device
        self.watchdog = watchdog
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.keeps_order = device.type == "cuda"
        self._num_sharing: int | None = None

    def share_experts(self, num_ranks: int) -> None:
        """Makes groups of ``num_ranks`` ranks that share the experts, unless the groups are such already.

        Collective.
        """
        if num_ranks == self._num_sharing:
            return
        if self._num_sharing is not None:
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks, create_gloo_process_groups=False)
        self._num_sharing = num_ranks

    def largest(self, value: float) -> float:
        """The largest of all ranks' values. Collective; all earlier work of the device has ended on all of them."""
        held = torch.full((1,), value, device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return held.item()

    def setting(self) -> dict[str, str | int | None]:
        """What the ranks are and how they are connected."""
        on_gpu = self.device.type == "cuda"
        version = torch.cuda.nccl.version() if on_gpu else None
        return {
            "ranks": self.num_ranks,
            "backend": str(dist.get_backend()),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            "device_index": self.device.index,
            "transport": os.environ.get("NCCL_NET", "NCCL's choice") if on_gpu else "sockets",
            "nccl": None if version is None else ".".join(map(str, version)),
            "torch": torch.__version__,
        }


@contextmanager
def connected(on_cpu: bool, watchdog: Watchdog) -> Iterator[RankPlace]:
    """Inside the context this rank is connected to the others, by the environment that torchrun would set."""
    if on_cpu:
        torch.set_num_threads(1)
        with cpu_platform():
            dist.init_process_group("gloo", timeout=_TIMEOUT)
            yield RankPlace(torch.device("cpu"), watchdog)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Without device_id, as Megatron does it: communicators are made when they are first used.
    dist.init_process_group("nccl", timeout=_TIMEOUT)
    with torch.compiler.set_stance("force_eager"):  # compiling takes longer than the ranks may
        yield RankPlace(device, watchdog)

"""``--cluster 32x8:h100,nvlink,400g``: nodes, GPUs of a node, the GPU, and the links of each GPU."""

import re
from dataclasses import dataclass

from megatron_lancet.errors import UsageError
from megatron_lancet.planning.sizes.gpus import GPUS, Gpu

FORM = "NODESxGPUS:GPU,INTRA,INTER"
EXAMPLE = "32x8:h100,nvlink,400g"
_NVLINK = "nvlink"


@dataclass(frozen=True)
class ClusterChoice:
    """The cluster that a user names.

    Attributes:
        name: of the GPU.
        intra_gbps: Gb/s of a GPU to others of its node, each way, by the data sheet.
        inter_gbps: Gb/s of a GPU to other nodes, each way.
    """

    num_nodes: int
    ranks_per_node: int
    name: str
    intra_gbps: float
    inter_gbps: float

    @property
    def num_ranks(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.ranks_per_node

    @property
    def gpu(self) -> Gpu:
        """The GPU's data sheet."""
        return GPUS[self.name]

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} x {self.ranks_per_node} {self.name.upper()}"
        return (
            f"{nodes}, {self.intra_gbps:g} Gb/s inside a node and {self.inter_gbps:g} Gb/s between nodes for each GPU"
        )

    @staticmethod
    def parse(text: str) -> "ClusterChoice":
        """Reads the flag's value.

        Raises:
            UsageError: the text has another form, or names an unknown GPU or link.
        """
        found = re.fullmatch(r"(\d+)x(\d+):([^,]+),([^,]+),([^,]+)", text.lower().replace(" ", ""))
        if found is None or "0" in (found[1].lstrip("0") or "0", found[2].lstrip("0") or "0"):
            raise UsageError(f"--cluster expects {FORM}, for example {EXAMPLE}, got {text}.")
        nodes, per_node, gpu, intra, inter = found.groups()
        if gpu not in GPUS:
            raise UsageError(f"--cluster: the GPU {gpu} is not known. Pass one of {', '.join(GPUS)}.")
        intra_gbps = GPUS[gpu].nvlink_gbps if intra == _NVLINK else _gbps(intra, f"{_NVLINK} or Gb/s such as 512g")
        return ClusterChoice(int(nodes), int(per_node), gpu, intra_gbps, _gbps(inter, "Gb/s of a GPU, such as 400g"))


def _gbps(text: str, expected: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)g?", text)
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--cluster expects a link as {expected}, got {text}.")
    return float(found[1])

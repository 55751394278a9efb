"""What one run of a step is measured by."""

from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Sample:
    """One step on one rank.

    With more than one micro-batch, passes may run side by side: forward figures are 0 then, and backward figures are
    the times of all passes.

    Attributes:
        step_ms: all of it, from a barrier on.
        forward_ms: forward pass.
        backward_ms: backward pass.
        pairs_ms: time from the end of the first micro-batch's forward to the start of the last one's backward, in which
            every backward but the last and every forward but the first run; 0 with one micro-batch.
        reduce_ms: data-parallel gradient reduction, 0 where it is not in the step.
        optimizer_ms: optimizer step, 0 where it is not in the step.
        exposed_forward_ms: time blocked in waits for payload in the forward pass.
        exposed_backward_ms: the same in the backward pass.
        counts_ms: time blocked in the exchange of token counts.
        cpu_ms: CPU time of the process, gloo's threads included.
        payload_bytes: bytes of rows that the rank sent to the other node in all-to-alls.
        reduced_bytes: bytes that a rank has to send for the gradient reduction.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    pairs_ms: float
    reduce_ms: float
    optimizer_ms: float
    exposed_forward_ms: float
    exposed_backward_ms: float
    counts_ms: float
    cpu_ms: float
    payload_bytes: float
    reduced_bytes: float

    @property
    def exposed_ms(self) -> float:
        """Time blocked in waits, for counts too."""
        return self.exposed_forward_ms + self.exposed_backward_ms + self.counts_ms


SAMPLE_FIELDS = [field.name for field in fields(Sample)]


def on_all_ranks(sample: Sample, *more: float) -> list[list[float]]:
    """The samples of all ranks, in the order of :data:`SAMPLE_FIELDS`, each followed by ``more``. Collective."""
    own = torch.tensor([*asdict(sample).values(), *more], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [[round(value, 4) for value in rank.tolist()] for rank in everyone]

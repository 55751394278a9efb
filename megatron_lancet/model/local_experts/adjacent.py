"""Tensors of several experts that lie side by side in memory, seen as one tensor without a copy.

Megatron's DDP lays out its buffers in reverse order of the parameters: fc2 of the last expert comes first, then its
fc1, then fc2 of the expert before. So the main gradients of one linear layer lie at equal distances, the last expert
first, except where a bucket ends with padding. With the distributed optimizer DDP keeps the parameters in such a
buffer; without it each has memory of its own, and :func:`lay_side_by_side` moves them.

Legend of shapes: e experts, O outputs, I inputs of a linear layer.
"""

from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 16
"""Grouped GEMMs load tiles whose addresses and row lengths are multiples of this."""


class AdjacentTensors:
    """Views of tensors [O, I] of all experts as tensors [j, O, I] of neighbours, ordered from the last expert down.

    A view is kept until a tensor has moved: DDP and the distributed optimizer write to their buffers in place.
    """

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._runs: list[torch.Tensor] = []

    def runs(self, tensors_OI: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of neighbours that lie at equal distances, the last expert at the lowest address.

        Args:
            tensors_OI: one per expert, in the experts' order.

        Returns:
            The view [j, O, I] of each run. The runs cover all experts, the last expert first; an expert without such a
            neighbour is a run of its own.
        """
        addresses = [tensor.data_ptr() for tensor in tensors_OI]
        if addresses != self._addresses:
            last_first = [tensor.detach() for tensor in reversed(tensors_OI)]
            self._runs = [_view_of(run) for run in _split_into_runs(last_first)]
            self._addresses = addresses
        return self._runs


def lay_side_by_side(parameters_OI: Sequence[torch.nn.Parameter]) -> None:
    """Moves parameters that have memory of their own into common memory, the last expert first.

    Names, identities and values stay the same. Parameters that lie in a larger buffer, such as the buffer of the
    distributed optimizer, stay where they are. For a moment the memory of the parameters is needed twice.
    """
    if any(weight.untyped_storage().nbytes() != weight.nbytes for weight in parameters_OI):
        return
    with torch.no_grad():
        together_eOI = torch.stack([weight.detach() for weight in reversed(parameters_OI)])
    for weight, place_OI in zip(reversed(parameters_OI), together_eOI, strict=True):
        weight.data = place_OI


def _split_into_runs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    runs: list[list[torch.Tensor]] = [[]]
    for tensor in tensors:
        run = runs[-1]
        if run and not _continues(run, tensor):
            run = []
            runs.append(run)
        run.append(tensor)
    return runs


def _continues(run: Sequence[torch.Tensor], tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` follows the tensors of ``run`` in the same memory, at their distance."""
    last = run[-1]
    if tensor.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return False
    distance = tensor.storage_offset() - last.storage_offset()
    if len(run) > 1:
        return distance == last.storage_offset() - run[-2].storage_offset()
    return distance >= tensor.numel() and distance * tensor.element_size() % ALIGNMENT_BYTES == 0


def _view_of(run: Sequence[torch.Tensor]) -> torch.Tensor:
    first = run[0]
    if len(run) == 1:
        return first.unsqueeze(0)
    assert all(tensor.is_contiguous() for tensor in run)
    distance = run[1].storage_offset() - first.storage_offset()
    return first.as_strided((len(run), *first.shape), (distance, *first.stride()), first.storage_offset())

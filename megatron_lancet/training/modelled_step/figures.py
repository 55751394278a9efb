"""Figures of a model of any depth from recordings of two that are less deep: what a layer adds, and the ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.schedule.timeline import RankTimeline
from megatron_lancet.training.modelled_step.recording import BACKWARD, Recording
from megatron_lancet.virtual_gpu.log import CollectiveBegins, CollectiveEnds, Entry, HostWaits, Kernel, Mark
from megatron_lancet.virtual_gpu.playback.by_op import is_weight_grad, kernels_by_op, timeline_of
from megatron_lancet.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.virtual_gpu.playback.player import Playback, play


@dataclass(frozen=True)
class LayerCounts:
    """What one layer adds to a log.

    Attributes:
        forward: kernels of the forward pass.
        backward: kernels of the backward pass, weight gradients included.
        weight_grads: kernels of deferred weight gradients.
        host_waits: times that the host waits for the GPU.
    """

    forward: float
    backward: float
    weight_grads: float
    host_waits: float


@dataclass(frozen=True)
class ModelledStep:
    """One micro-batch on a device.

    Attributes:
        step_ms: of all layers.
        exposed_share: see :class:`Playback`; of the layers that were recorded.
    """

    step_ms: float
    exposed_share: float


class Variant:
    """One way to run the model: recordings of two depths."""

    def __init__(self, name: str, shallow: tuple[int, Recording], deep: tuple[int, Recording]) -> None:
        """
        Args:
            shallow: number of layers, and their recording; of the same depth as ``deep`` if that is the whole model.
        """
        self.name = name
        self._shallow = shallow
        self._deep = deep

    def counts(self) -> LayerCounts:
        """Kernels and host waits of a layer; of the whole micro-batch by layer where there is one depth only."""
        (few, shallow), (many, deep) = self._shallow, self._deep
        without, with_them = _counts(shallow.log), _counts(deep.log)
        if few == many:
            few, without = 0, [0, 0, 0, 0]
        return LayerCounts(*((b - a) / (many - few) for a, b in zip(without, with_them, strict=True)))

    def step(self, device: DeviceModel, num_layers: int) -> ModelledStep:
        """The modelled micro-batch of a model with this number of layers."""
        (few, shallow), (many, deep) = self._shallow, self._deep
        played = play(deep.log, device)
        step_us = played.step_us
        if few != many:
            step_us += (num_layers - many) * (played.step_us - play(shallow.log, device).step_us) / (many - few)
        return ModelledStep(step_us / 1e3, played.exposed_share)

    def timeline(self, device: DeviceModel) -> RankTimeline:
        """The timeline of the deeper recording; it has ops only where a plan runs."""
        return timeline_of(self.played(device), self._deep[1].messages)

    def played(self, device: DeviceModel) -> Playback:
        """The deeper recording, played."""
        return play(self._deep[1].log, device)


def _counts(log: Sequence[Entry]) -> list[int]:
    """Kernels forward and backward, those of weight gradients, and host waits."""
    passes, collectives, place = [0, 0], set(), 0
    for entry in log:
        match entry:
            case Mark(_, name) if name == BACKWARD:
                place = 1
            case CollectiveBegins():
                collectives.add(entry.stream)
            case CollectiveEnds():
                collectives.discard(entry.stream)
            case Kernel() if entry.stream not in collectives:
                passes[place] += 1
    weight_grads = sum(number for name, number in kernels_by_op(log).items() if is_weight_grad(name))
    return [*passes, weight_grads, sum(isinstance(entry, HostWaits) for entry in log)]

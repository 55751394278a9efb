"""Figures of a model of any depth from recordings of two that are less deep: what a layer adds, and the ends.

A plan with pairs is recorded in steps of two lengths. What a micro-batch adds is what one costs whose forward and
backward both have a partner; the rest of a step is what its two ends cost besides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_lancet.lab.modelled_step.recording import BACKWARD, Recording
from megatron_lancet.schedule.timeline import RankTimeline
from megatron_lancet.testkit.virtual_gpu.log import CollectiveBegins, CollectiveEnds, Entry, HostWaits, Kernel, Mark
from megatron_lancet.testkit.virtual_gpu.playback.by_op import is_weight_grad, kernels_by_op, timeline_of
from megatron_lancet.testkit.virtual_gpu.playback.device_model import DeviceModel
from megatron_lancet.testkit.virtual_gpu.playback.marks import TURN_BEGINS, TURN_ENDS
from megatron_lancet.testkit.virtual_gpu.playback.player import Playback, play


@dataclass(frozen=True)
class LayerCounts:
    """One layer's part of a log.

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
        ends_ms: time of a step in pairs beyond its micro-batches, because at its ends a micro-batch has no partner.
    """

    step_ms: float
    exposed_share: float
    ends_ms: float = 0.0


@dataclass(frozen=True)
class Depth:
    """The record of a model.

    Attributes:
        num_layers: number of its layers.
        longer: a micro-batch, or a step in pairs.
        shorter: a step in pairs with one micro-batch less; None without pairs.
    """

    num_layers: int
    longer: Recording
    shorter: Recording | None = None

    def added(self, of: Callable[[Recording], float]) -> float:
        """A figure of a micro-batch: what the last one adds to a step in pairs."""
        return of(self.longer) - (of(self.shorter) if self.shorter is not None else 0)


class Variant:
    """One way to run the model: recordings of two depths."""

    def __init__(self, name: str, shallow: Depth, deep: Depth) -> None:
        """
        Args:
            shallow: the model with fewer layers; the same as ``deep`` if that is the full model.
        """
        self.name = name
        self._shallow = shallow
        self._deep = deep

    def counts(self) -> LayerCounts:
        """Kernels and host waits of a layer; of the full micro-batch by layer where there is one depth only."""
        counts = [self._by_layer(partial(_count, which)) for which in range(4)]
        return LayerCounts(*counts)

    def step(self, device: DeviceModel, num_layers: int) -> ModelledStep:
        """The modelled micro-batch of a model with this number of layers."""
        shallow, deep = self._shallow, self._deep
        played: dict[int, Playback] = {}

        def of(recording: Recording) -> Playback:
            return played.setdefault(id(recording), play(recording.log, device))

        def scaled(figure: Callable[[Depth], float]) -> float:
            if shallow.num_layers == deep.num_layers:
                return figure(deep)
            by_layer = (figure(deep) - figure(shallow)) / (deep.num_layers - shallow.num_layers)
            return figure(deep) + (num_layers - deep.num_layers) * by_layer

        def micro_batch_us(depth: Depth) -> float:
            return depth.added(lambda one: of(one).step_us)

        def ends_us(depth: Depth) -> float:
            return of(depth.longer).step_us - depth.longer.num_micro_batches * micro_batch_us(depth)

        exposed_us = deep.added(lambda one: of(one).exposed_us)
        wire_us = deep.added(lambda one: of(one).wire_us)
        return ModelledStep(
            scaled(micro_batch_us) / 1e3, exposed_us / wire_us if wire_us else 0.0, scaled(ends_us) / 1e3
        )

    def timeline(self, device: DeviceModel) -> RankTimeline:
        """The timeline of the deeper recording; it has ops only where a plan runs."""
        return timeline_of(self.played(device), self._deep.longer.messages)

    def played(self, device: DeviceModel) -> Playback:
        """The deeper recording, played."""
        return play(self._deep.longer.log, device)

    def _by_layer(self, figure: Callable[[Recording], float]) -> float:
        shallow, deep = self._shallow, self._deep
        if shallow.num_layers == deep.num_layers:
            return deep.added(figure) / deep.num_layers
        return (deep.added(figure) - shallow.added(figure)) / (deep.num_layers - shallow.num_layers)


def _count(which: int, recording: Recording) -> int:
    return _counts(recording.log)[which]


def _counts(log: Sequence[Entry]) -> list[int]:
    """Kernels of forward, backward and weight gradients, and host waits."""
    passes, collectives, place, is_turn = [0, 0], set(), 0, False
    for entry in log:
        match entry:
            case Mark(_, name) if name == BACKWARD:
                place = 1
            case Mark(kind) if kind in (TURN_BEGINS, TURN_ENDS):
                is_turn = kind == TURN_BEGINS
            case CollectiveBegins():
                collectives.add(entry.stream)
            case CollectiveEnds():
                collectives.discard(entry.stream)
            case Kernel() if entry.stream not in collectives:
                passes[0 if is_turn else place] += 1
    weight_grads = sum(number for name, number in kernels_by_op(log).items() if is_weight_grad(name))
    return [*passes, weight_grads, sum(isinstance(entry, HostWaits) for entry in log)]

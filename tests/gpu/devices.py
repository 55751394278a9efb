"""What the tests in this folder run on: a GPU, or the virtual GPU where there is none.

Each test is written once. ``make test-gpu`` runs it on a device; ``make test``, which hides devices, runs it on the
virtual GPU, so that no line of a test runs for the first time when somebody has a GPU. Tests that only a device can run
are marked with :data:`ON_DEVICE_ONLY`: those of clocks, kernels and futures that the virtual GPU lacks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_lancet.patching import replaced
from megatron_lancet.testkit.mock.mock_world import mock_world
from megatron_lancet.testkit.virtual_gpu.device import VirtualGpu
from megatron_lancet.testkit.virtual_gpu.link import virtual_link
from megatron_lancet.testkit.virtual_gpu.megatron import virtual_gpu_platform
from megatron_lancet.training.platform.cpu import cpu_platform, gpu_available


class Choice(NamedTuple):
    """What the fixture ``device`` gives.

    Attributes:
        late: name of the virtual GPU's stream that runs as late as the order permits.
    """

    is_virtual: bool
    late: str | None = None

    def __str__(self) -> str:
        return f"virtual-late-{self.late}" if self.late else "virtual" if self.is_virtual else "gpu"


def _on(*choices: Choice) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("device", [_parameters(choice) for choice in choices], indirect=True)


def _parameters(choice: Choice, *others: str) -> Any:
    marks = () if choice.is_virtual else (pytest.mark.gpu,)
    return pytest.param(choice, *others, marks=marks, id="-".join((str(choice), *others)))


def on_both_with(name: str, values: Iterable[str], on_virtual_gpu: Iterable[str]) -> pytest.MarkDecorator:
    """On a device with each of ``values`` of the argument ``name``, on the virtual GPU with some: it is slower."""
    parameters = [_parameters(Choice(False), value) for value in values]
    parameters += [_parameters(Choice(True), value) for value in on_virtual_gpu]
    return pytest.mark.parametrize(("device", name), parameters, indirect=["device"])


ON_DEVICE_ONLY = _on(Choice(False))
ON_BOTH = _on(Choice(False), Choice(True))


def on_both_with_late(*streams: str) -> pytest.MarkDecorator:
    """On a device and on the virtual GPU, there also with each of these streams late."""
    return _on(Choice(False), Choice(True), *(Choice(True, name) for name in streams))


class Device:
    """A GPU."""

    is_virtual = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Runs the kernels inside of the context; at its end all have run."""
        yield
        torch.cuda.synchronize()

    @contextmanager
    def mocked_link(self) -> Iterator[None]:
        """Inside the context messages of mocked groups are those of the mocked link on a device."""
        yield

    @contextmanager
    def group_of_one(self, folder: Path) -> Iterator[dist.ProcessGroup]:
        """A group of one rank, which sends to itself: NCCL's."""
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()

    def keep_busy(self) -> None:
        """Gives the current stream about a millisecond to do."""
        torch.cuda._sleep(1_500_000)

    def problems(self) -> list[str]:
        """Orders that were missing so far; a device can't tell."""
        return []


class VirtualDevice(Device):
    """The virtual GPU."""

    is_virtual = True

    def __init__(self, gpu: VirtualGpu, late: str | None) -> None:
        self.gpu = gpu
        self._late = late

    @contextmanager
    def watch(self) -> Iterator[None]:
        late = [stream for stream in self.gpu.streams if self._late is not None and self._late in stream.name]
        assert late or self._late is None, f"no stream is called {self._late}"
        with self.gpu.watch(late):
            yield

    @contextmanager
    def mocked_link(self) -> Iterator[None]:
        with virtual_link(self.gpu):
            yield

    @contextmanager
    def group_of_one(self, folder: Path) -> Iterator[dist.ProcessGroup]:
        with mock_world(1):
            yield dist.group.WORLD

    def keep_busy(self) -> None:
        """Does nothing: a stream that is late has not even begun."""

    def problems(self) -> list[str]:
        return [problem.text for problem in self.gpu.problems]


@contextmanager
def chosen(choice: Choice) -> Iterator[Device]:
    """The device that a test runs on; skips the test where it can't."""
    if not choice.is_virtual:
        if not gpu_available():
            pytest.skip("needs a CUDA device, and sees one only in make test-gpu")
        # Megatron compiles some functions, which takes minutes. The scale of auxiliary losses may be another device's.
        no_scale = replaced(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
        with torch.compiler.set_stance("force_eager"), no_scale:
            yield Device()
        return
    if gpu_available():
        pytest.skip("make test runs it on the virtual GPU, where no device is seen")
    with cpu_platform(), virtual_gpu_platform() as gpu:
        yield VirtualDevice(gpu, choice.late)

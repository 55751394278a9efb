"""Transformer Engine on a CPU: its real Python from the pinned wheel, and plain torch for its compiled extension.

The wheel is pure Python. ``make`` unpacks it into ``te/`` of the virtual environment, outside site-packages: Megatron's
import fails where it finds the package without its extension. ``extension.py`` stands in for the extension
``transformer_engine_torch``; no file of Transformer Engine or Megatron is changed.
"""

import importlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SITE = Path(sys.prefix) / "te"
"""Folder of the wheel and of the packages that it imports."""
ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # Transformer Engine's own switch: load no library on import
    "NVTE_TORCH_COMPILE": "0",
    "TRITON_INTERPRET": "1",  # its Triton kernels can run in Python
}
"""Environment variables of a process that installs it."""


def is_installed() -> bool:
    """Whether this process has called :func:`install`."""
    return "transformer_engine_torch" in sys.modules


def install() -> None:
    """Imports Transformer Engine with the stand-in. Call it before anything imports Megatron or Triton."""
    assert "megatron.core" not in sys.modules, "Megatron has looked for Transformer Engine already"
    assert "triton" not in sys.modules, "Triton has chosen how to run kernels already"
    sys.path.insert(0, str(SITE))
    os.environ.update(ENVIRONMENT)
    from tests.te_cpu import apex, extension

    sys.modules["transformer_engine_torch"] = extension
    sys.modules["fused_weight_gradient_mlp_cuda"] = apex
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that there is no extension, and leaves out its torch part
        import transformer_engine
    from transformer_engine import common

    common.load_framework_extension = lambda framework: None
    for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]:
        del sys.modules[name]
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = _module_with_any_name(
        "transformer_engine.pytorch.onnx_extensions"  # needs onnx, for export only
    )
    transformer_engine.pytorch = importlib.import_module("transformer_engine.pytorch")


@contextmanager
def te_platform(capability: tuple[int, int] = (9, 0), interprets_triton: bool = False) -> Iterator[None]:
    """Megatron's CPU settings with a device that Transformer Engine accepts.

    Transformer Engine keeps what it finds out about a device: a process has one capability.

    Args:
        capability: compute capability of the device: 8.9 or 9.0 for fp8, 10.0 for MXFP8.
        interprets_triton: see :func:`tests.te_cpu.device.te_device`.
    """
    from megatron_lancet.training.platform.cpu import cpu_platform
    from tests.te_cpu.device import te_device

    with cpu_platform(), te_device(capability, interprets_triton):
        yield


def _module_with_any_name(name: str) -> types.ModuleType:
    module = types.ModuleType(name)

    def get(attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *_, **__: None

    vars(module)["__getattr__"] = get
    return module

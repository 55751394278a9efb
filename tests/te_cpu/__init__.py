"""Transformer Engine on a CPU: its real Python from the pinned wheel, and plain torch for its compiled extension.

The wheel is pure Python. It lies in ``te/`` of the virtual environment, outside site-packages: Megatron's import fails
where it finds the package without its extension. ``kernels.py`` stands in for the extension
``transformer_engine_torch``; no file of Transformer Engine or Megatron is changed.
"""

import importlib
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

SITE = Path(sys.prefix) / "te"
"""Folder of the wheel and of the packages that it imports."""


def install() -> None:
    """Imports Transformer Engine with the stand-in. Call it before anything imports Megatron."""
    assert "megatron.core" not in sys.modules, "Megatron has looked for Transformer Engine already"
    sys.path.insert(0, str(SITE))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # Transformer Engine's own switch: load no library on import
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    from tests.te_cpu import kernels

    sys.modules["transformer_engine_torch"] = kernels
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
def te_platform(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Megatron's CPU settings with a device that Transformer Engine accepts.

    Args:
        capability: compute capability of the device; fp8 needs 8.9, MXFP8 10.0.
    """
    import torch

    from megatron_lancet.patching import replaced
    from megatron_lancet.training.platform.cpu import cpu_platform

    properties = SimpleNamespace(
        name="cpu", total_memory=0, major=capability[0], minor=capability[1], multi_processor_count=1
    )
    with ExitStack() as stack:
        stack.enter_context(cpu_platform())
        stack.enter_context(replaced(torch.Tensor, "is_cuda", property(lambda self: True)))
        stack.enter_context(replaced(torch.cuda, "get_device_properties", lambda *_: properties))
        stack.enter_context(replaced(torch.cuda, "get_device_capability", lambda *_: capability))
        yield


def _module_with_any_name(name: str) -> types.ModuleType:
    module = types.ModuleType(name)

    def get(attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return lambda *_, **__: None

    module.__getattr__ = get
    return module

"""The Triton kernels of the product, to be interpreted on a CPU or to be compiled for a device."""

import importlib.util
from pathlib import Path
from types import ModuleType

import triton

PACED_COPY = "megatron_lancet.testkit.mock.paced_kernel"
ROW_SUMS = "megatron_lancet.runtime.rows.sum_kernel"


def loaded_kernels(
    interpreted: bool, change: tuple[str, str] | None = None, folder: Path | None = None, name: str = PACED_COPY
) -> ModuleType:
    """A copy of a kernel's module: whether a kernel is interpreted is decided where it is defined.

    Args:
        name: the module.
        change: text of the module, which has it once or more, and what takes its place; written to ``folder``.
    """
    spec = importlib.util.find_spec(name)
    if change is not None:
        text = Path(spec.origin).read_text()
        assert change[0] in text
        path = folder / "changed.py"
        path.write_text(text.replace(*change))
        spec = importlib.util.spec_from_file_location("changed", path)
    module = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpreted
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    return module

"""Tools as modules, so that a test calls their ``main`` in its own process."""

import importlib.util
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[2]
TOOLS = REPOSITORY / "tools"


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{Path(name).name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

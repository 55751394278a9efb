"""The overlap in verl's Megatron workers: a plug-in of the entry point ``verl.plugins``.

verl loads it with ``import verl``, in all of its processes and before Megatron. So nothing happens without
``LANCET_FLAGS``, and with it the overlap is installed behind the import of verl's Megatron engine. verl drops errors of
plug-ins while it loads them, so this one ends the process; later errors end the worker.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from megatron_lancet.config import FLAGS_VARIABLE
from megatron_lancet.errors import UsageError
from megatron_lancet.library.launchers import install_from_environment
from megatron_lancet.training.process.exit import refuse_now

_ENGINE = "verl.workers.engine.megatron.transformer_impl"


class BehindEngine(MetaPathFinder, Loader):
    """Loads verl's Megatron engine as Python does, and installs the overlap afterwards."""

    def __init__(self) -> None:
        """
        Raises:
            UsageError: the installed verl has no such engine.
        """
        packages = getattr(sys.modules.get("verl"), "__path__", ())
        file = Path(*_ENGINE.split(".")[1:]).with_suffix(".py")
        if not any((Path(folder) / file).is_file() for folder in packages):
            raise UsageError(
                f"expected {_ENGINE} in the verl that loads this plug-in, found none. Install verl 0.9, or unset "
                f"{FLAGS_VARIABLE}."
            )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _ENGINE else None
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        install_from_environment()


if FLAGS_VARIABLE in os.environ and not any(isinstance(one, BehindEngine) for one in sys.meta_path):
    try:
        sys.meta_path.insert(0, BehindEngine())
    except UsageError as error:
        refuse_now(error)

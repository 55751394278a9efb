"""A folder in Hugging Face format, as Megatron-Bridge reads it."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError, reason_of
from megatron_lancet.features.hugging_face.flags import FROM

INSTALL = (
    "pip install --no-deps megatron-bridge==0.6.2, and what it imports: requirements-bridge.txt lists it. "
    "Without --no-deps pip needs CUDA"
)
CONFIG = "config.json"


class Source:
    """A model in a folder.

    Attributes:
        folder: its path.
        architecture: its class in ``transformers``.
        pretrained: Bridge's view of the folder, which reads tensors when they are asked for.
        weights: Bridge's converter for its family.
        provider: Bridge's configuration of Megatron's model.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            UsageError: it is no such folder, Bridge is not installed, or Bridge does not know the model.
        """
        self.folder = folder
        _check_files(folder)
        auto = _import_bridge()
        try:
            bridge = auto.from_hf_pretrained(str(folder))
            self.provider: Any = bridge.to_megatron_provider(load_weights=False)
            self.weights: Any = bridge._model_bridge
        except (ValueError, KeyError, AttributeError, OSError) as error:
            if "not yet supported" in str(error) or "not supported by AutoBridge" in str(error):
                names = ", ".join(auto.list_supported_models())
                raise UsageError(
                    f"{FROM} {folder}: Megatron-Bridge does not know its model. Take one of {names}"
                ) from None
            raise UsageError(f"{FROM} {folder}: Megatron-Bridge can't read it: {reason_of(error)}") from error
        self.pretrained: Any = bridge.hf_pretrained
        self.weights.mapping_registry = _with_local_experts(self.weights.mapping_registry)
        self.weights._with_progress_tracking = lambda tasks, *_, **__: tasks
        self.architecture: str = self.pretrained.config.architectures[0]

    def tensor_names(self) -> set[str]:
        """Names of the tensors in its files."""
        return set(self.pretrained.state.source.get_all_keys())


@cache
def source_of(folder: str) -> Source:
    """The model in a folder, read once.

    Raises:
        UsageError: see :class:`Source`.
    """
    return Source(Path(folder))


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(
            f"{FROM} expects a folder, found none at {folder}. Download the model first, with hf download NAME "
            f"--local-dir {folder}."
        )
    for pattern in (CONFIG, "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise UsageError(f"{FROM} {folder}: expected {pattern} in it, found none. Download the whole model.")


def _import_bridge() -> Any:
    """``AutoBridge``, which also knows the families of this folder.

    Raises:
        UsageError: Bridge is not installed, or does not import.
    """
    if find_spec("megatron.bridge") is None:
        raise UsageError(f"{FROM} needs Megatron-Bridge, which is not installed: {INSTALL}.")
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise UsageError(f"{FROM} needs Megatron-Bridge, which can't be imported ({error}): {INSTALL}.") from error
    from megatron_lancet.features.hugging_face import mixtral

    mixtral.register()
    return AutoBridge


def _with_local_experts(stock: Any) -> Any:
    """Adds the names of sequential experts to a family's mappings; Bridge has them for some families only."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    def mapping_registry() -> Any:
        mappings = stock().mappings
        known = {mapping.megatron_param for mapping in mappings}
        more: list[Any] = []
        for mapping in mappings:
            grouped = mapping.megatron_param
            name = grouped.replace(".experts.linear_fc", ".experts.local_experts.*.linear_fc").removesuffix("*")
            if name == grouped or name in known:
                continue
            if type(mapping) is GatedMLPMapping:
                more.append(GatedMLPMapping(name, gate=mapping.hf_param["gate"], up=mapping.hf_param["up"]))
            elif type(mapping) is AutoMapping:
                more.append(AutoMapping(name, mapping.hf_param, mapping.permute_dims))
        return MegatronMappingRegistry(*mappings, *more)

    return mapping_registry

"""Internals that this project uses of Transformer Engine, and of Megatron's wrappers of it.

They are checked where a run overlaps layers of Transformer Engine. What matters is how the modules compute weight
gradients, which no signature shows; so their source is searched, as ``seams.py`` does for parts of DDP. The sources of
versions 2.8 to 2.20 have all of these parts.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.utils import get_te_version
from packaging.version import Version

from megatron_lancet.errors import UsageError

_OLDEST = Version("2.8")
_MODULES = "transformer_engine.pytorch.module"
_WRAPPERS = "megatron.core.extensions.transformer_engine"


@dataclass(frozen=True)
class _Part:
    """A piece of code that must be found in a module.

    Attributes:
        pattern: regular expression.
        meaning: what the piece does, for the message that it is missing.
        everywhere: text at each occurrence of which the pattern must match; empty if one place is enough.
    """

    module: str
    pattern: str
    meaning: str
    everywhere: str = ""

    def is_in(self, source: str) -> bool:
        """Whether the module, with this source text, has the piece."""
        num_found = len(re.findall(self.pattern, source))
        return num_found > 0 and (not self.everywhere or num_found == source.count(self.everywhere))


_ADDS_TO_MAIN_GRAD = r"fuse_wgrad_accumulation and not \w+\.is_first_microbatch"
_STORE = r"self\.wgrad_store = WeightGradStore\("


def _linear_parts() -> Iterator[_Part]:
    """Yields the parts that all of Transformer Engine's linear modules have, each with its own arguments of ``put``."""
    for name, tensors in {"linear": 2, "layernorm_linear": 2, "grouped_linear": 3}.items():
        module = f"{_MODULES}.{name}"
        arguments = r", ".join([r"\w+"] * tensors)
        yield _Part(
            module,
            rf"wgrad_store\.put\(\[{arguments}\], \w+\)",
            f"wgrad_store.put of {tensors} tensors and a function",
            everywhere="wgrad_store.put(",
        )
        yield _Part(module, _ADDS_TO_MAIN_GRAD, "the rule by which dW is added to main_grad")
        yield _Part(module, _STORE, "the attribute wgrad_store")
        for attribute in ("fuse_wgrad_accumulation", "use_bias"):
            yield _Part(module, rf"self\.{attribute} = ", f"the attribute {attribute}")


_PARTS: tuple[_Part, ...] = (
    *_linear_parts(),
    _Part(f"{_MODULES}.grouped_linear", r"self\.num_gemms = ", "the attribute num_gemms"),
    _Part(f"{_MODULES}.base", r"self\._fp8_workspaces\b", "the attribute _fp8_workspaces"),
    _Part(f"{_MODULES}._common", r"def put\(self, tensor_list, func\)", "WeightGradStore.put(tensor_list, func)"),
    _Part(f"{_MODULES}._common", r"def delay_wgrad_compute\(self\)", "WeightGradStore.delay_wgrad_compute()"),
    _Part(
        "transformer_engine.pytorch.distributed",
        r"def get_activation_recompute_contexts\(\)",
        "the function get_activation_recompute_contexts",
    ),
    _Part(
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
        r'attention_params != _attention_backends\["attention_params"\]',
        "the comparison with the parameters of the last selection of an attention backend",
    ),
    _Part(_WRAPPERS, r"self\.is_first_microbatch = False", "the attribute is_first_microbatch"),
    _Part(_WRAPPERS, r"def forward\(self, x, m_splits\)", "the grouped linear's forward(x, m_splits)"),
    _Part(
        _WRAPPERS,
        r"query: Tensor,\s+key: Tensor,\s+value: Tensor,\s+attention_mask: Optional\[Tensor\],"
        r"\s+attn_mask_type: AttnMaskType",
        "TEDotProductAttention.forward(query, key, value, attention_mask, attn_mask_type)",
    ),
)


def _source_of(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def check_te_seams(
    version: Callable[[], Version] = get_te_version, source_of: Callable[[str], str] = _source_of
) -> None:
    """Checks the installed Transformer Engine.

    Args:
        version: returns its version.
        source_of: returns the source text of a module.

    Raises:
        UsageError: it is too old, or lacks something; the message names all that is missing.
    """
    installed = version()
    if installed < _OLDEST:
        raise UsageError(
            f"expected Transformer Engine {_OLDEST} or newer, found {installed}, whose deferred weight gradients have "
            "another form. Install a newer one, or pass --transformer-impl local, or --lancet-plan off."
        )
    missing = [f"{part.meaning} in {part.module}" for part in _PARTS if not part.is_in(source_of(part.module))]
    if missing:
        raise UsageError(
            f"this Transformer Engine, {installed}, differs from the supported versions: it lacks "
            f"{', '.join(missing)}. Install version 2.20, or pass --transformer-impl local, or --lancet-plan off."
        )

"""Hugging Face tokenizers: where one is, and texts to ids in batches.

Megatron's own class reads them, as in training: for some classes ``transformers`` builds other rules than those in
``tokenizer.json``, so ids of that file alone may differ. Importing this module is cheap.
"""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_lancet.errors import UsageError, reason_of

HUGGING_FACE_TYPE = "HuggingFaceTokenizer"
"""Megatron's ``--tokenizer-type``."""

_PACKAGES = ("tokenizers", "transformers")
_TOKENIZER_JSON = "tokenizer.json"
_FILES = (_TOKENIZER_JSON, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")
"""A folder with a tokenizer has one of them."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_SUFFIXES = (".json", ".model", ".txt")


def tokenizer_source(model: str | None) -> str:
    """Find a tokenizer, as Megatron takes it: a folder, or a name on the hub.

    Args:
        model: ``--tokenizer-model``: a folder, the ``tokenizer.json`` in it, or a name on the hub.

    Raises:
        UsageError: a package is missing, ``model`` is None, or there is no tokenizer at this path.
    """
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise UsageError(
            f"--tokenizer-type {HUGGING_FACE_TYPE} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    expected = (
        f"--tokenizer-type {HUGGING_FACE_TYPE} needs --tokenizer-model, a folder with {_TOKENIZER_JSON} or a name"
    )
    if not model:
        raise UsageError(f"{expected} on the hub; none was given")
    path = Path(model)
    if path.is_file():
        if path.name != _TOKENIZER_JSON:
            raise UsageError(
                f"{expected}; {model} is another file. Save it as {_TOKENIZER_JSON} in a folder of its own, with "
                "tokenizer_config.json, which names the eos_token."
            )
        path = path.parent
    if path.is_dir():
        if not any((path / name).is_file() for name in _FILES):
            raise UsageError(f"{expected}; {model} has none of {', '.join(_FILES)}")
        return str(path)
    if _HUB_NAME.fullmatch(model) is None or model.endswith(_FILE_SUFFIXES):
        raise UsageError(f"{expected} on the hub; {model} does not exist")
    return model


def refusal(source: str, error: BaseException) -> UsageError:
    """The error for a tokenizer that Megatron could not build from :func:`tokenizer_source`."""
    reason = reason_of(error.__context__ or error)
    if Path(source).is_dir():
        return UsageError(
            f"the tokenizer in {source} can't be read ({reason}); copy its files again, or check that the installed "
            "transformers knows its class"
        )
    return UsageError(
        f"there is no folder {source}, and no such tokenizer can be loaded from the hub ({reason}); pass a folder with "
        f"its {_TOKENIZER_JSON} and tokenizer_config.json"
    )


def use_one_core() -> None:
    """Make ``tokenizers`` use one core per process, unless the environment says otherwise."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def batch_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without the special tokens that a tokenizer may add at its ends.

    Args:
        tokenizer: Megatron's, of :data:`HUGGING_FACE_TYPE`.
        texts: none is empty.
    """
    if not texts:
        return []
    inner = tokenizer._tokenizer.tokenizer
    ids: list[list[int]] = inner(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # else a note on texts longer than the model's context
    ).input_ids
    return ids

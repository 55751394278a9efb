"""The tests' stand-in of transformer_engine_torch has the functions and enumerations that its C++ binds."""

import functools
import inspect
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests import te_cpu
from tests.te_cpu import extension

FILES = ("csrc/extensions/pybind.cpp", "common_headers/common/util/pybind_helper.h", "csrc/extensions.h")
BOUND_ELSEWHERE = {"get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams"}
"""Bound to functions of the core library, which take nothing; extensions.h does not declare them."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a bound function; ``is_keyword``: Python may pass it by this name."""

    name: str
    is_keyword: bool
    is_optional: bool


@functools.cache
def sources() -> str:
    """The C++ of the pinned source distribution that binds and declares the functions."""
    (archive,) = (te_cpu.SITE / "sdist").glob("transformer_engine_torch-*.tar.gz")
    with tarfile.open(archive) as files:
        root = files.getnames()[0].split("/")[0]
        return "\n".join(files.extractfile(f"{root}/{name}").read().decode() for name in FILES)


def in_parentheses(text: str, start: int) -> str:
    """What stands between the parenthesis at ``start`` and the one that closes it."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 1 : i]
    raise AssertionError(f"no end: {text[start : start + 80]}")


def declared(function: str) -> Iterator[Parameter]:
    """Parameters of a function in extensions.h, by position only."""
    found = re.search(rf"\b{function}\s*\(", sources())
    assert found is not None, f"{function} has no declaration"
    text = re.sub(r"<[^<>]*(<[^<>]*>)?[^<>]*>", "", in_parentheses(sources(), found.end() - 1))
    for words in filter(None, map(str.strip, text.split(","))):
        yield Parameter(words.split("=")[0].split()[-1].lstrip("*&"), False, "=" in words)


@functools.cache
def bound() -> dict[str, list[Parameter]]:
    """Parameters of each bound function whose C++ is declared in extensions.h, or whose parameters are named."""
    functions = {}
    for found in re.finditer(r"\bm\.def\(", sources()):
        text = in_parentheses(sources(), found.end() - 1)
        head = re.match(r'\s*"(\w+)"\s*,\s*&?([\w:]+)', text)
        if head is None:
            continue
        name, function = head[1], head[2].split("::")[-1]
        named = re.findall(r'py::arg\("(\w+)"\)\s*(=)?', text)
        if named:
            functions[name] = [Parameter(word, True, bool(default)) for word, default in named]
        elif name not in BOUND_ELSEWHERE and re.search(rf"\b{function}\s*\(", sources()[sources().index("#ifndef") :]):
            functions[name] = list(declared(function))
    return functions


@functools.cache
def enumerations() -> dict[str, set[str]]:
    text = sources().replace("\\\n", "\n")
    found = re.findall(r'enum_<[\w:]+>\(\s*m,\s*"(\w+)"((?:.|\n)*?);', text)
    return {name: set(re.findall(r'\.value\(\s*"(\w+)"', values)) for name, values in found}


def ours() -> list[str]:
    return [name for name, value in vars(extension).items() if inspect.isfunction(value) and not name.startswith("__")]


def test_te_bindings_are_found():
    assert len(bound()) > 120
    assert len(enumerations()) == 15
    assert len(ours()) > 40


@pytest.mark.parametrize("name", ours())
def test_te_stand_in_has_the_parameters_of_the_binding(name):
    parameters = list(inspect.signature(getattr(extension, name)).parameters.values())
    if name in BOUND_ELSEWHERE:
        assert re.search(rf'\bm\.def\(\s*"{name}"', sources())
        assert parameters == []
        return
    theirs = bound()[name]
    assert len(parameters) == len(theirs)
    for mine, binding in zip(parameters, theirs, strict=True):
        if binding.is_keyword:
            assert (mine.name, mine.default is not mine.empty) == (binding.name, binding.is_optional)
        else:  # a call by name would fail there
            assert mine.kind == mine.POSITIONAL_OR_KEYWORD


@pytest.mark.parametrize("name", sorted(enumerations()))
def test_te_stand_in_has_the_members_of_the_enumeration(name):
    assert {member.name for member in getattr(extension, name)} == enumerations()[name]


def test_te_stand_in_raises_what_it_lacks_by_name():
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.fused_qkv_rope_forward"):
        extension.fused_qkv_rope_forward()

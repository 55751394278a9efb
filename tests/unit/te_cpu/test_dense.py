"""The stand-ins check that tensors are dense where their C++ reads by address alone."""

import functools
import inspect
import re
import tarfile

import pytest
import torch

from tests import te_cpu
from tests.te_cpu import extension
from tests.te_cpu.dense import NotDenseError, check_dense

ELSEWHERE = {
    "workspace": "scratch memory",
    "rng_gen": "a generator",
    "fused_attn_params": "sizes",
}
"""Parameters that are not value tensors."""
BY_LAYOUT = {"fused_attn_fwd": {"Q", "K", "V"}, "fused_attn_bwd": {"Q", "K", "V"}}
"""The layout gives the strides of parts of one tensor; the functions check other tensors."""
_NAMES = {"fused_attn_fwd": {"cu_seqlens_q_padded", "cu_seqlens_kv_padded", "page_table_k", "page_table_v"}}
UNUSED = {**_NAMES, "fused_attn_bwd": {"cu_seqlens_q_padded", "cu_seqlens_kv_padded"}}
"""Parameters that the stand-in does not read."""


@functools.cache
def sources() -> str:
    """Returns the C++ of the functions that Python calls."""
    (archive,) = (te_cpu.SITE / "sdist").glob("transformer_engine_torch-*.tar.gz")
    with tarfile.open(archive) as files:
        names = [name for name in files.getnames() if re.search(r"/csrc/extensions/.*\.cpp$", name)]
        return "\n".join(files.extractfile(name).read().decode() for name in names)


def definition(function: str) -> tuple[list[str], str] | None:
    """Returns the parameters and body of a C++ function."""
    for found in re.finditer(rf"^[\w:<>, ]+\s\*?{function}\(", sources(), re.MULTILINE):
        end = closing(sources(), found.end() - 1, "()")
        begin = sources().index("{", end)
        if ";" in sources()[end:begin]:
            continue  # a declaration
        text = re.sub(
            r"<[^<>]*(<[^<>]*>)?[^<>]*>", lambda part: part[0].replace(",", " "), sources()[found.end() : end]
        )
        return [" ".join(words.split()) for words in text.split(",")], sources()[
            begin : closing(sources(), begin, "{}")
        ]
    return None


def closing(text: str, start: int, pair: str) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise AssertionError(f"no end: {text[start : start + 80]}")


def read_by_address(function: str) -> set[int] | None:
    """Returns positions of tensors without ``contiguous`` or strides in C++; None if there is no such function."""
    found = definition(function)
    if found is None:
        return None
    parameters, body = found
    places = set()
    for place, words in enumerate(parameters):
        kind, _, name = words.split("=")[0].strip().rpartition(" ")
        name = name.lstrip("*&")
        is_tensor = "Tensor" in kind or "py::handle" in kind or "py::object" in kind
        if not is_tensor or "quantizer" in name.lower():
            continue
        if not re.search(rf"\b{name}(\.value\(\))?(\.|->)(contiguous|stride)\(", body):
            places.add(place)
    return places


def ours() -> list[str]:
    return [name for name, value in vars(extension).items() if inspect.isfunction(value) and not name.startswith("__")]


@pytest.mark.parametrize("name", ours())
def test_te_stand_in_checks_tensors_read_by_address(name):
    places = read_by_address(name)
    if places is None:
        assert name in ("get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams") or name in sources()
        return
    function = getattr(extension, name)
    parameters = list(inspect.signature(function).parameters)
    needed = {parameters[place] for place in places} - ELSEWHERE.keys()
    checked = set(getattr(function, "dense_parameters", ())) | BY_LAYOUT.get(name, set()) | UNUSED.get(name, set())
    assert needed <= checked, f"{name} passes addresses of {sorted(needed - checked)} to its kernel"


def test_kernels_that_read_by_address_are_found_in_the_sources():
    """Negative control: an empty search would pass every stand-in."""
    assert read_by_address("fused_multi_row_padding") == {0, 1}
    assert read_by_address("layernorm_bwd") == set()  # makes all tensors dense
    assert read_by_address("fused_rope_forward") == {1, 2, 5}  # the input has strides
    assert sum(read_by_address(name) is not None for name in ours()) >= 40


def test_te_padding_refuses_rows_of_a_packed_message():
    message = torch.zeros(6, 10)
    rows, padded = message[:, :8], torch.empty(16, 8)
    with pytest.raises(NotDenseError, match=r"fused_multi_row_padding reads input by its address.*strides \[10, 1\]"):
        extension.fused_multi_row_padding(rows, padded, [6], [16])
    extension.fused_multi_row_padding(rows.contiguous(), padded, [6], [16])


def test_density_is_checked_in_lists_and_in_quantized_tensors():
    class Quantized:
        def __init__(self, data: torch.Tensor) -> None:
            self._quantizer, self._data, self._transpose = None, data, None

    gaps = torch.zeros(4, 6)[:, :4]
    for value in (gaps, [torch.zeros(2), [gaps]], Quantized(gaps)):
        with pytest.raises(NotDenseError, match="kernel reads rows"):
            check_dense("kernel", "rows", value)
    check_dense("kernel", "rows", [None, Quantized(gaps.contiguous()), torch.zeros(4, 6)[:2], 1.0])

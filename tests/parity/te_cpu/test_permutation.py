"""The tests' permutation in torch equals Transformer Engine's Triton kernels, run by Triton's interpreter."""

import pytest
import torch

from tests.ranks import launch
from tests.te_cpu import permutation as ours

pytestmark = pytest.mark.distributed

TOKENS, EXPERTS, HIDDEN, TOPK = 6, 4, 8, 3


def difference(theirs, mine) -> float:
    """Of tensors, inf where their types or shapes differ; 0 where both are None."""
    if theirs is None or mine is None:
        return 0.0 if theirs is mine else float("inf")
    if (theirs.dtype, theirs.shape) != (mine.dtype, mine.shape):
        return float("inf")
    return (theirs.float() - mine.float()).abs().max().item()


def compare(name: str, *args) -> list[float]:
    """Differences of what a function returns."""
    from transformer_engine.pytorch.triton import permutation as theirs

    assert getattr(theirs, name) is not getattr(ours, name)
    results = [getattr(module, name)(*args) for module in (theirs, ours)]
    pairs = [result if isinstance(result, tuple) else (result,) for result in results]
    return [difference(a, b) for a, b in zip(*pairs, strict=True)]


def routing(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A routing map whose tokens go to 3 experts, the first to none and the second to 1; and probabilities."""
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    routed = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, logits.topk(TOPK, dim=1).indices, True)
    routed[0] = False
    routed[1] = torch.arange(EXPERTS) == 2
    probs = logits.softmax(dim=1) * routed
    probs[2, routed[2].nonzero()[0]] = 0.0
    return routed, probs


def cases() -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    routed, probs = routing(generator)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    num_rows = int(routed.sum())
    rows = torch.randn(num_rows, HIDDEN, generator=generator)
    lines = ours.make_row_id_map(routed, TOKENS, EXPERTS)
    entries = torch.arange(2 * EXPERTS + 1) % EXPERTS < lines[:, -1:]  # what a kernel leaves alone is not compared
    entries[:, -1] = True
    sizes, order = torch.tensor([2, 0, 3, num_rows - 6]), torch.tensor([2, 0, 3, 1])
    chunk_map = ours.make_chunk_sort_map(sizes, order, num_rows, 4)
    found = {"chunk map": compare("make_chunk_sort_map", sizes, order, num_rows, 4)}
    from transformer_engine.pytorch.triton.permutation import make_row_id_map

    found["row map"] = [difference(make_row_id_map(routed, TOKENS, EXPERTS) * entries, lines * entries)]
    padding = torch.tensor([0, 1, 1, 3])
    for name, offsets, size in (("", None, num_rows), (" padded", padding, num_rows + 3)):
        shape = (TOKENS, EXPERTS, size, HIDDEN)
        padded = torch.randn(size, HIDDEN, generator=generator)
        own = torch.rand(size, generator=generator)
        found["permute" + name] = compare("permute_with_mask_map", tokens, lines, probs, None, offsets, *shape, 0)
        found["unpermute" + name] = compare(
            "unpermute_with_mask_map", padded, lines, probs, own, offsets, TOKENS, EXPERTS, HIDDEN
        )
        found["merging gradient" + name] = compare(
            "unpermute_with_mask_map_bwd_with_merging_probs",
            *(tokens.float(), lines, padded, probs, offsets, *shape),
        )
    found["permute without probabilities"] = compare(
        "permute_with_mask_map", tokens, lines, None, tokens.float(), None, TOKENS, EXPERTS, num_rows, HIDDEN, HIDDEN
    )
    found["unpermute alone"] = compare(
        "unpermute_with_mask_map", rows, lines, None, None, None, TOKENS, EXPERTS, HIDDEN
    )
    for forward in (True, False):
        own = torch.rand(num_rows, generator=generator)
        found[f"sort {forward}"] = compare("sort_chunks_by_map", rows, chunk_map, own, num_rows, HIDDEN, forward)
    return found


def test_te_permutation_equals_triton_kernels(tmp_path):
    (differences,) = launch.results_of(cases, 1, tmp_path, te=launch.Te(interprets_triton=True))
    assert len(differences) == 12
    # A kernel sums the gradient of a probability in another order.
    assert {name: found for name, found in differences.items() if max(found) > 2e-6} == {}
    exact = {name: found for name, found in differences.items() if not name.startswith("merging")}
    assert {name: found for name, found in exact.items() if any(found)} == {}

"""Transformer Engine's fp8 recipes in chunks, EP=2 on two ranks: its real Python, with its kernels in plain torch."""

from collections.abc import Iterator

import pytest

from tests.gradient_deviations import TOLERANCE
from tests.parity.te.fp8_worker import BLACKWELL, HOPPER, IN_FP32, NO_CACHE, NUM_STEPS, RECIPES, results_of_recipes
from tests.ranks import launch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(820)]

WHOLE = "k=1"
NUM_WEIGHTS = 18
"""Three layers of two linears in attention and two in each of a rank's two experts."""
OTHER_NUM_WEIGHTS = {
    "one-expert": NUM_WEIGHTS * 2 // 3,  # two linears fewer in each layer
    "first-last-bf16": NUM_WEIGHTS // 3,  # one layer
    "fp8-weights": 0,
    "mtp": NUM_WEIGHTS + 6 + 1,  # a layer and a projection more
    "output": NUM_WEIGHTS + 1,
}
"""By a part of the recipe's name."""
NUM_SCALED = 15
"""Modules with scales: in each layer core attention and four linears, of which two have several weights."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: what the worker found for each recipe."""
    parts = [
        launch.results_of(results_of_recipes, 2, tmp_path_factory.mktemp("fp8"), 400, args=names, te=device)
        for names, device in ((HOPPER, launch.Te()), (BLACKWELL, launch.Te((10, 0))))
    ]
    return [{**hopper, **blackwell} for hopper, blackwell in zip(*parts, strict=True)]


def cases(chunked: bool) -> Iterator[tuple[str, str]]:
    named = ((name, plan) for name, recipe in RECIPES.items() for plan in recipe.plans)
    return ((name, plan) for name, plan in named if (not plan.startswith(WHOLE)) == chunked)


@pytest.mark.parametrize(("recipe", "plan"), cases(chunked=False))
def test_fp8_gradients_of_one_chunk_equal_stock_to_the_bit(results, recipe, plan, check_gradients):
    for result in results:
        found = result[recipe]["plans"][plan]
        for gradients in found["gradients"]:
            check_gradients(gradients, 0.0, recipe, "fp8")
        assert found["loss"] == 0
        assert found["other_scaling"] == []


@pytest.mark.parametrize(("recipe", "plan"), [(name, plan) for name in IN_FP32 for plan in RECIPES[name].plans])
def test_delayed_scaling_of_chunks_is_that_of_one_call(results, recipe, plan, check_gradients):
    """Amax histories and scales to the bit: a history takes the maximum over calls, and moves on once a micro-batch.

    Activations are fp32, so that nothing else differs but the order of sums.
    """
    for result in results:
        found = result[recipe]["plans"][plan]
        assert found["other_scaling"] == []
        assert found["num_scaling"] == NUM_SCALED * 2 * 2  # forward and backward, scale and history
        assert found["moved_scaling"]
        for gradients in found["gradients"]:
            check_gradients(gradients, TOLERANCE, plan, "fp8 in fp32")


@pytest.mark.parametrize(
    ("recipe", "plan"), [(name, plan) for name, one in RECIPES.items() if name != NO_CACHE for plan in one.plans]
)
def test_weights_are_quantized_once_a_step(results, recipe, plan):
    for result in results:
        found = result[recipe]["plans"][plan]
        # In a model's first step stock quantizes some weights once more after certain other models of the process.
        assert [step.keys() for step in found["quantized"]] == [step.keys() for step in found["quantized_by_stock"]]
        assert found["quantized"][1:] == found["quantized_by_stock"][1:]
        assert found["num_stashed"] == 0
        expected = next((count for part, count in OTHER_NUM_WEIGHTS.items() if part in recipe), NUM_WEIGHTS)
        assert [list(step.values()) for step in found["quantized"]] == [[1] * expected] * NUM_STEPS


def test_count_of_quantizations_sees_each_chunk(results):
    """Without Transformer Engine's cache each of two chunks of two micro-batches quantizes the weights."""
    for result in results:
        found = result[NO_CACHE]["plans"]["k=2"]
        for ours, stock in zip(found["quantized"], found["quantized_by_stock"], strict=True):
            assert list(stock.values()) == [2] * NUM_WEIGHTS
            assert list(ours.values()) == [4] * NUM_WEIGHTS


@pytest.mark.parametrize(("recipe", "plan"), cases(chunked=True))
def test_fp8_gradients_of_chunks_are_as_close_to_fp32_as_stock(results, recipe, plan):
    """Chunks round other values to fp8, so gradients differ from stock's; their errors must not grow."""
    for result in results:
        errors = result[recipe]["errors"]
        ours, stock = errors[plan], errors["stock"]
        assert 0.01 < stock["median"] < 0.2
        assert ours["median"] <= 1.15 * stock["median"]
        assert ours["worst"] <= 1.25 * stock["worst"]


def test_bytes_of_deferred_dws_count_quantized_tensors(results):
    """64 tokens a micro-batch: a byte for each number of the input and of the output's gradient, in dW's layout."""
    tokens, hidden = 64, 64
    for result in results:
        found = result["delayed"]["plans"][WHOLE]
        for layer in (1, 2, 3):
            qkv = f"L{layer}.W.self_attention.linear_qkv"
            assert found["dw_bytes"][qkv] == tokens * hidden + tokens * 3 * hidden
        assert found["peak_dw_bytes"] >= max(found["dw_bytes"].values())
        in_halves = result["delayed"]["plans"]["k=2"]["dw_bytes"]
        assert in_halves["L1.W.self_attention.linear_qkv"] * 2 == found["dw_bytes"]["L1.W.self_attention.linear_qkv"]

"""Models on the virtual GPU whose attention and routing are replayed from CUDA graphs."""

from collections import Counter
from contextlib import ExitStack

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.features.cuda_graphs.block import CapturedBlock, Source
from megatron_lancet.features.cuda_graphs.stage import StageGraphs
from megatron_lancet.model import transformer_layer
from megatron_lancet.patching import around, replaced
from megatron_lancet.testkit.virtual_gpu.graphs.pool import VirtualPool
from tests.features.cuda_graphs.settings import deterministic
from tests.virtual_gpu.case import Case, run
from tests.virtual_gpu.cases import CASES, DDP_LATE, LATE_DW, ONE, PAIRED, SHARED, SMALL, TWO, paired_case

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")
CASE = Case([ONE], {**SMALL, **SHARED}, late=DDP_LATE, is_captured=True)
PAIRS = paired_case([PAIRED], SMALL, late=DDP_LATE, is_captured=True)


def test_replayed_steps_launch_less_and_run_the_same_kernels():
    eager = run(Case([ONE], {**SMALL, **SHARED}))
    found = run(CASE)
    assert found.problems == []
    assert found.graphs["num_graphs"] == 4  # two layers, forward and backward
    assert (found.graphs["num_replayed_micro_batches"], found.graphs["num_eager_micro_batches"]) == (6, 0)
    assert found.launches[0] < 0.7 * eager.launches[0]
    more, less = (Counter(one) for one in (found.kernels[0], eager.kernels[0]))
    assert set(more - less) == {"copy_", "clone", "cat"}
    assert set(less - more) <= {"zeros"}  # where this test drops what Megatron has logged
    assert found.kernels[0] == found.kernels[1]


def test_host_launches_of_two_chunks_fall_by_a_third():
    """In this model; by half in ``benchmarks/parts/graphs.py``, whose experts are one kernel."""
    eager = run(Case([TWO], SMALL))
    found = run(Case([TWO], SMALL, is_captured=True))
    assert found.graphs["num_graphs"] == 8  # two layers, two chunks, forward and backward
    assert found.launches[0] < 0.67 * eager.launches[0]


def test_losses_that_megatron_logs_equal_stocks():
    found = run(CASE)
    assert found.logged == 0.0
    assert found.largest_error == 0.0


def _without_copies_of_gradients(stack: ExitStack) -> None:
    """Deferred dWs of the shared experts of the layer before keep the gradient of hidden states."""

    def replay(stock, block, grads):
        with replaced(torch.Tensor, "clone", lambda tensor: tensor.view_as(tensor)):
            return stock(block, grads)

    stack.enter_context(around(CapturedBlock, "replay_backward", replay))


def _replayed_twice(stack: ExitStack) -> None:
    """A backward adds its dWs to the gradient once more."""

    def replay(stock, block, grads):
        stock(block, grads)
        return stock(block, grads)

    stack.enter_context(around(CapturedBlock, "replay_backward", replay))


def _without_inputs(stack: ExitStack) -> None:
    """A forward runs on the hidden states of the micro-batch before."""
    stack.enter_context(around(CapturedBlock, "replay_forward", lambda stock, block, _: stock(block, ())))


def _one_slot(stack: ExitStack) -> None:
    """Two micro-batches in flight take the same blocks."""

    def begin(stock, stage, *args):
        stage._in_flight.clear()
        stock(stage, *args)

    stack.enter_context(around(StageGraphs, "_begin_micro_batch", begin))


def _one_pool(stack: ExitStack) -> None:
    """The graphs of two micro-batches in flight reuse each other's memory."""
    pools: list[VirtualPool] = []

    def handle(stock):
        pools.append(stock())
        return pools[0]

    stack.enter_context(around(torch.cuda, "graph_pool_handle", handle))


DAMAGES = {
    "gradients": (Case([LATE_DW], {**SMALL, **SHARED}, is_captured=True), _without_copies_of_gradients),
    "twice": (CASE, _replayed_twice),
    "inputs": (CASE, _without_inputs),
    "slots": (PAIRS, _one_slot),
    "pools": (PAIRS, _one_pool),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_broken_rule_of_replays_is_found(name):
    case, damage = DAMAGES[name]
    if case is PAIRS or name == "twice":
        with pytest.raises(RuntimeError, match="out of bounds"):  # a gather by numbers of another tensor
            run(case, damage)
    else:
        found = run(case, damage)
        assert found.graphs["num_replayed_micro_batches"]
        assert found.largest_error > 1e-3


def test_deterministic_mode_changes_no_input():
    found = run(CASE, lambda stack: stack.enter_context(deterministic()))
    assert (found.problems, found.largest_error) == ([], 0.0)


def test_capture_of_pairs_needs_a_forward_on_its_own_thread():
    def without(stack: ExitStack) -> None:
        stack.enter_context(replaced(Source, "warm_up_thread", lambda *_: None))

    with pytest.raises(UsageError, match="is the first product of this thread"):
        run(PAIRS, without)


def test_slot_is_freed_without_a_gradient_of_the_embedding():
    found = run(CASES["graphs/frozen"])
    assert found.graphs["num_graphs"] == 2 * 2  # two layers, one slot


def test_autograd_is_not_asked_for_deferred_weights():
    """It would make the capture wait for the stream of their accumulation nodes."""
    asked: list[bool] = []

    def grad(stock, outputs, inputs, *args, **kwargs):
        asked.extend(getattr(tensor, "skip_backward_post_hook", False) for tensor in inputs)
        return stock(outputs, inputs, *args, **kwargs)

    found = run(CASE, lambda stack: stack.enter_context(around(torch.autograd, "grad", grad)))
    assert found.largest_error == 0.0
    assert asked
    assert not any(asked)


def test_model_wrapped_on_the_default_stream_is_refused():
    def wrapped(stack: ExitStack) -> None:
        def capture(stock, stage):
            for layer, _ in stage._layers.values():
                layer.stock.self_attention.linear_qkv.deferred.ddp_stream = torch.cuda.default_stream()
            stock(stage)

        stack.enter_context(around(StageGraphs, "capture", capture))

    with pytest.raises(UsageError, match="wrapped in DDP on CUDA's default stream"):
        run(CASE, wrapped)


def test_rotary_embedding_is_kept_for_replays():
    """Latent attention's own is in a cache of some lengths."""

    def dropping(stack: ExitStack) -> None:
        def run_and_drop(stock, stage, *args):
            stock(stage, *args)
            for layer, _ in stage._layers.values():
                type(layer.stock.self_attention.rotary_pos_emb).forward.cache_clear()

        for name in ("__init__", "capture"):  # so the embedding is made while the GPU is watched
            stack.enter_context(around(StageGraphs, name, run_and_drop))

    found = run(CASES["graphs/mla"], dropping)
    assert (found.problems, found.largest_error) == ([], 0.0)


def test_pairs_equal_stock_with_a_slot_for_each_in_flight():
    found = run(PAIRS)
    assert (found.problems, found.largest_error) == ([], 0.0)
    assert found.graphs["num_graphs"] == 3 * 4  # the next forward begins before the last layer's backward has ended


def test_micro_batch_beyond_the_slots_runs_eagerly():
    def fewer(stack: ExitStack) -> None:
        def capture(stock, stage):
            stage._num_slots = 1
            stock(stage)

        stack.enter_context(around(StageGraphs, "capture", capture))

    found = run(PAIRS, fewer)
    assert (found.problems, found.largest_error) == ([], 0.0)
    assert found.graphs["num_eager_micro_batches"] == 6
    assert found.graphs["num_replayed_micro_batches"] == 3


def test_routing_maps_keep_their_values_behind_the_next_replay():
    """A trace counts them when the step has ended."""
    maps: list[tuple[torch.Tensor, list]] = []

    def keep(stack: ExitStack) -> None:
        stack.enter_context(around(CapturedBlock, "__call__", called))

    def called(stock, block, x, *earlier):
        stock(block, x, *earlier)
        maps.append((x.routing_map_tE, x.routing_map_tE.tolist()))

    run(CASE, keep)
    assert len({str(values) for _, values in maps}) > 1
    assert all(kept.tolist() == values for kept, values in maps)


def test_capture_that_fails_is_refused_with_what_to_do():
    def looking(stack: ExitStack) -> None:
        def normed(stock, layer, hidden):
            assert hidden.sum().item() or True
            return stock(layer, hidden)

        stack.enter_context(around(transformer_layer, "_norm", normed))

    with pytest.raises(UsageError, match=r"can't be captured: _local_scalar_dense .* Drop --lancet-cuda-graphs\."):
        run(CASE, looking)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("module", ["linear_qkv", "core_attention"])
def test_hook_on_a_captured_module_is_refused(module, kind):
    def hooked(stack: ExitStack) -> None:
        def capture(stock, stage):
            layer, _ = stage._layers[1]
            getattr(getattr(layer.stock.self_attention, module), f"register_{kind}_hook")(print)
            stock(stage)

        stack.enter_context(around(StageGraphs, "capture", capture))

    with pytest.raises(UsageError, match=r"hook print on \w+ would not run in a CUDA graph"):
        run(CASE, hooked)


@pytest.mark.parametrize("is_captured", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("changed", ["hook", "frozen"])
def test_weights_changed_beside_the_capture_are_refused(changed, is_captured):
    """A replay calls no hook on a weight's gradient, and goes on training a frozen weight."""

    def change(stack: ExitStack) -> None:
        def capture(stock, stage):
            weight = stage._layers[1][0].stock.self_attention.linear_qkv.weight
            if is_captured:
                stock(stage)
            if changed == "frozen":
                weight.requires_grad_(False)
            else:
                weight.register_hook(print)
            if not is_captured:
                stock(stage)

        stack.enter_context(around(StageGraphs, "capture", capture))

    with pytest.raises(UsageError, match="found a weight that was frozen or got a hook"):
        run(CASE, change)


def test_hooks_of_gathered_parameters_run_before_each_replay():
    """DDP's hook waits for a module's parameters; it can't be in a graph."""
    calls: list[str] = []

    def hooked(stack: ExitStack) -> None:
        def hook(module, *_):
            assert not torch.cuda.CUDAGraph.gpu.capture, "in a capture"
            calls.append(type(module).__name__)

        hook.__module__ = "megatron.core.distributed.test"

        def capture(stock, stage):
            layer, _ = stage._layers[1]
            layer.stock.mlp.router.register_forward_pre_hook(hook)
            stock(stage)

        stack.enter_context(around(StageGraphs, "capture", capture))

    found = run(CASE, hooked)
    assert found.largest_error == 0.0
    assert calls == ["ChunkedTopKRouter"] * found.graphs["num_replayed_micro_batches"]

"""CUDA graphs on the virtual GPU: what a capture refuses, what a replay runs, and what is wrong without its rules."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from megatron.core.tensor_parallel import random

from megatron_lancet.features.cuda_graphs.block import Pool
from megatron_lancet.patching import around
from megatron_lancet.testkit.virtual_gpu.device import virtual_gpu
from megatron_lancet.testkit.virtual_gpu.graphs.graph import CaptureError
from megatron_lancet.testkit.virtual_gpu.graphs.pool import VirtualPool
from tests.features.cuda_graphs.settings import deterministic

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")
ROWS = torch.arange(8.0)


@contextmanager
def watched(*late: str):
    with virtual_gpu() as gpu, gpu.watch([stream for stream in gpu.streams if stream.name in late]):
        yield gpu


@contextmanager
def captured(pool=None):
    with Pool(pool, torch.cuda.Stream()).capture() as graph:
        yield graph


@pytest.mark.parametrize("late", [(), ("compute",)])
def test_replay_runs_kernels_again_on_the_same_memory(late):
    with watched(*late):
        rows = ROWS.cuda() + 0
        with captured() as graph:
            doubled = rows * 2
            rows.add_(1)
        for step in (1, 2):
            graph.replay()
            assert doubled.tolist() == (2 * (ROWS + step - 1)).tolist()
        assert rows.tolist() == (ROWS + 2).tolist()


def test_capture_runs_nothing():
    with watched():
        rows = ROWS.cuda() + 0
        with captured() as graph:
            rows.add_(1)
        assert rows.tolist() == ROWS.tolist()
        assert [kernel.name for kernel in graph.kernels] == ["add_"]


def test_backward_is_captured_behind_its_forward():
    with watched():
        with captured() as forward:
            rows = torch.empty(8, device="cuda", requires_grad=True)
            total = (rows * rows).sum()
        with captured() as backward:
            (grad,) = torch.autograd.grad(total, rows)
        for factor in (1, 3):
            rows.detach().copy_(factor * ROWS.cuda())
            forward.replay()
            backward.replay()
            assert grad.tolist() == (2 * factor * ROWS).tolist()


@pytest.mark.parametrize(
    "look",
    [
        lambda rows: rows.sum().item(),
        lambda rows: rows[rows > 1],
        lambda rows: rows.cpu(),
        lambda rows: rows + torch.ones(8),
        lambda rows: torch.cuda.synchronize(),
        lambda rows: torch.set_rng_state(torch.get_rng_state()),
        lambda rows: torch.cuda.current_stream().record_event().synchronize(),
        lambda rows: torch.cuda.current_stream().record_event().query(),
        lambda rows: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
        lambda rows: torch.cuda.current_stream().wait_stream(torch.cuda.Stream()),
    ],
    ids=["item", "mask", "cpu", "host", "device", "random", "event", "query", "fork", "join"],
)
def test_capture_refuses_what_cuda_refuses(look):
    with watched():
        rows = ROWS.cuda() + 0
        with pytest.raises(CaptureError, match=r"test_graphs\.py"), captured():
            look(rows)
        assert rows.tolist() == ROWS.tolist()


def test_kernels_of_a_capture_draw_from_states_of_the_tracker():
    """As attention of Transformer Engine does, whose tracker keeps generators."""
    of_tracker, other = torch.Generator(), torch.Generator()
    with watched(), around(random.CudaRNGStatesTracker, "get_states", lambda *_: {"of graphs": of_tracker}):
        rows = ROWS.cuda() + 0
        with captured():
            rows.normal_(generator=of_tracker)
        with pytest.raises(CaptureError, match="normal_ draws from a random state"), captured():
            rows.normal_(generator=other)


def test_states_that_are_not_for_graphs_are_not_registered():
    states = {"of Megatron": torch.Generator().get_state()}
    with watched(), around(random.CudaRNGStatesTracker, "get_states", lambda *_: states), captured() as graph:
        pass
    assert not graph.generators


def test_first_product_of_a_thread_is_refused_in_a_capture():
    """A library makes its handle then. With pairs all eager forwards run on another thread than the capture."""
    with watched() as gpu:
        rows = ROWS.cuda().view(2, 4) + 0

        def product():
            with gpu.operators():
                return rows @ rows.t()

        with ThreadPoolExecutor(1) as other:
            other.submit(product).result()
        with pytest.raises(CaptureError, match="mm is the first product of this thread"), captured():
            rows @ rows.t()
        product()
        with captured():
            rows @ rows.t()


def test_deterministic_mode_fills_new_memory_in_each_replay():
    with watched(), deterministic():
        with captured() as graph:
            rows = torch.empty(8, device="cuda")
        rows.copy_(ROWS.cuda())
        graph.replay()
        assert rows.isnan().all()


def test_failed_capture_raises_its_own_error():
    with watched():
        rows, before = ROWS.cuda() + 0, torch.cuda.current_stream()
        hidden = pytest.raises(CaptureError, match="previous error during capture")
        with hidden, torch.cuda.graph(torch.cuda.CUDAGraph()):
            rows.cpu()
        assert torch.cuda.current_stream() is not before
        torch.cuda.set_stream(before)
        with pytest.raises(CaptureError, match="a wait for a stream is not permitted"), captured():
            rows.cpu()
        assert torch.cuda.current_stream() is before


def test_graph_reads_freed_memory_that_nobody_kept_for_it():
    """A graph holds addresses, not tensors."""
    with watched():
        rows = ROWS.cuda() + 0
        with captured() as graph:
            doubled = rows * 2
        del rows
        graph.replay()
        assert doubled.isnan().all()


def test_graphs_of_a_pool_reuse_what_an_earlier_one_has_freed():
    with watched() as gpu:
        pool = VirtualPool(gpu.memory)
        rows = ROWS.cuda() + 0
        with captured(pool) as first:
            one = rows + 1
        with captured() as other_pool:
            of_other = rows + 3
        one = one.detach()
        address = one.data_ptr()
        del one
        with captured(pool) as second:
            two = rows + 2
        assert two.data_ptr() == address
        for graph in (first, other_pool, second):
            graph.replay()
        assert two.tolist() == (ROWS + 2).tolist()
        assert of_other.tolist() == (ROWS + 3).tolist()
        assert pool.num_bytes == two.nbytes
        assert gpu.problems == []


def test_replay_races_with_another_streams_read_of_its_outputs():
    with watched() as gpu:
        rows = ROWS.cuda() + 0
        with captured() as graph:
            doubled = rows * 2
        graph.replay()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled + 1
        graph.replay()
        assert [problem.kind for problem in gpu.problems] == ["race"]

"""The real pretraining loop in one process that plays a world of 8: ours and stock, every iteration compared."""

import pytest

from megatron_lancet.planning.load.placement import placement_to_json
from tests.parity.runs.test_losses_equal_stock import COMPARED, TOLERANCE
from tests.ranks.pretraining import Run, pretrain

WORLD_OF_8 = (
    "--distributed-backend mock --expert-model-parallel-size 8 --num-experts 16 --global-batch-size 64 "
    "--overlap-grad-reduce --ddp-bucket-size 20000 --eval-iters 1 --eval-interval 3"
).split()


def run_mocked(token_data, folder, *extra: object) -> Run:
    return pretrain(token_data, [*WORLD_OF_8, *extra], folder, num_ranks=1, train_iters=4, WORLD_SIZE="8")


@pytest.fixture(scope="module")
def stock(tmp_path_factory, token_data):
    return run_mocked(token_data, tmp_path_factory.mktemp("stock"), "--lancet-plan", "off")


def test_mocked_run_is_announced(stock):
    (output,) = stock.outputs
    assert output.count("mocked: this process plays rank 0 of 8, link free.") == 1
    assert "losses and throughput are of the mocked world" in output
    assert len(stock.logged) == 4  # Megatron's own lines, which only the last rank prints
    assert "validation loss at iteration 3" in output


def test_losses_of_one_chunk_equal_stock_bitwise(stock, token_data, tmp_path):
    ours = run_mocked(token_data, tmp_path, "--lancet-num-chunks", 1, "--lancet-report", tmp_path)
    assert "exposed time by cause: none, since expected the traces of at least two ranks" in ours.outputs[0]
    assert "megatron_lancet.model.transformer_block" in ours.model_modules
    for name in COMPARED:
        assert ours.series(name) == stock.series(name), name


def test_losses_of_two_chunks_on_a_slow_link_equal_stock(stock, token_data, tmp_path):
    ours = run_mocked(token_data, tmp_path, "--lancet-num-chunks", 2, "--lancet-mock-link", "300:1")
    assert "chunks=2" in ours.outputs[0]
    assert "link 300 us, 1 GB/s" in ours.outputs[0]
    for name in COMPARED:
        assert ours.series(name) == pytest.approx(stock.series(name), rel=TOLERANCE["fp32"][name]), name


def test_losses_of_two_hops_equal_stock_bitwise(stock, token_data, tmp_path):
    """Two nodes of four ranks, with another link inside them."""
    links = ("--lancet-mock-link", "300:1", "--lancet-mock-node-link", "20:10")
    hops = ("--lancet-ranks-per-node", 4, "--lancet-dispatch", "two-hop", "--lancet-num-chunks", 1)
    ours = run_mocked(token_data, tmp_path, *hops, *links)
    assert "link 300 us, 1 GB/s (20 us, 10 GB/s inside a node)" in ours.outputs[0]
    assert "dispatch=two-hop); two hops over 2 nodes x 4 ranks" in ours.outputs[0]
    for name in COMPARED:
        assert ours.series(name) == stock.series(name), name


def test_losses_of_experts_at_other_ranks_equal_stock(stock, token_data, tmp_path):
    """In a loopback all ranks have the first one's experts: an expert may take another's rank, but not its place."""
    path = tmp_path / "placement.json"
    experts = tuple((rank + 3) % 8 * 2 + place for rank in range(8) for place in (0, 1))
    path.write_text(placement_to_json({2: experts}))
    ours = run_mocked(token_data, tmp_path, "--lancet-num-chunks", 1, "--lancet-expert-placement", path)
    assert "; experts of 1 layer are not in Megatron's order" in ours.outputs[0]
    for name in COMPARED:
        assert ours.series(name) == pytest.approx(stock.series(name), rel=TOLERANCE["fp32"][name]), name

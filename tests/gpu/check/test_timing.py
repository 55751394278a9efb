"""The timing part of the GPU check: all variants in turns, on links and free; one that fails is left out."""

from benchmarks.gpu.check.part import graphs, machine, timing
from benchmarks.gpu.check.summary import measured
from benchmarks.gpu.table import found_in
from benchmarks.gpu.variants import MEGATRON_OVERLAP, STOCK, Runner
from megatron_lancet.patching import around, replaced
from tests.gpu.check.rehearsed import all_of

LINK = "10 us, 350 GB/s"
VARIANTS = (STOCK, "ours k=1", "pairs", "tiles", MEGATRON_OVERLAP)
"""Each kind once; ``test_smoke`` runs all plans."""


def test_all_variants_take_turns_and_one_that_fails_is_left_out(tmp_path):
    def step(stock, runner, *args):
        if runner.setup is not None and any(one.tiles for one in runner.setup.plan.segments):
            raise RuntimeError("no memory")
        return stock(runner, *args)

    with around(Runner, "step", step), replaced(timing, "VARIANTS", VARIANTS):
        records = all_of(timing.run, tmp_path)
    found = found_in(records)
    assert found.skipped["tiles"] == "RuntimeError: no memory"
    assert "resized" in found.skipped[MEGATRON_OVERLAP]
    assert [*found.samples[LINK]] == [name for name in VARIANTS if name not in found.skipped]
    for samples in found.samples[LINK].values():
        assert len(samples.step_ms) == 2
        assert 0 < samples.exposed_ms[0] <= samples.wire_ms[0]
        assert samples.gradient_error < 0.05
    assert [*found.samples["free"]] == [STOCK]
    assert set(measured(records, ["10:350"])) == {*found.samples[LINK], "ideal"}


def test_steps_with_graphs_run_beside_those_without(tmp_path):
    pairs = [STOCK, *(name for name in graphs.VARIANTS if name.startswith("pairs"))]
    with replaced(graphs, "VARIANTS", pairs):
        found = found_in(all_of(graphs.run, tmp_path))
    assert not found.skipped
    assert [*found.samples[LINK]] == pairs != [STOCK]
    for samples in found.samples[LINK].values():
        assert len(samples.step_ms) == 2
        assert samples.gradient_error < 0.05


def test_the_machine_is_described(tmp_path):
    records = {record["name"]: record for record in all_of(machine.run, tmp_path)}
    assert records["devices"]["devices"] == ["virtual GPU"]
    assert records["packages"]["megatron.core"]
    assert records["versions"]["megatron_core"].startswith("0.19")

"""Whatever happens to one rank, all ranks end soon, with a status that is not 0 and a line that says why."""

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron.core.rerun_state_machine import EXIT_CODE_RESUME_TO_DISAMBIGUATE

from tests.ranks import launch
from tests.ranks.preloaded import Rank
from tests.ranks.pretraining import EP2, command_line, parse_log

pytestmark = pytest.mark.distributed

WORKER = launch.REPO / "tests/faults/faulty_worker.py"
SCRIPT = launch.REPO / "pretrain_gpt_moe.py"
SILENCE_S = 10
ENDS_WITHIN_S = 60
"""From the start of the processes, on a busy machine; most of it is imports."""


class Ranks:
    """Two ranks of a training in which rank 1 meets a fault."""

    def __init__(self, token_data, folder, fault: str, *extra: str) -> None:
        self.folder = folder
        self.go = folder / "go"
        env = {
            "LANCET_TEST_FAULT": fault,
            "LANCET_TEST_FAULTY_RANK": "1",
            "LANCET_TEST_GO": str(self.go),
        }
        if fault.startswith(("stop", "loop")):
            env["LANCET_TEST_TIMEOUT_S"] = str(SILENCE_S)  # otherwise Megatron's ten minutes
        arguments = command_line(token_data, [*EP2, "--train-iters", "3", "--lancet-num-chunks", "2", *extra])
        self.processes = launch.start(WORKER, arguments, 2, folder, env)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def results(self, num_ranks: int = 2) -> list[launch.RankResult]:
        """How the first ``num_ranks`` ended; fails if they have not."""
        return launch.finish(self.processes[:num_ranks], self.folder, ENDS_WITHIN_S)

    def wait_until_held(self) -> None:
        """Until rank 1 is held and rank 0 waits for what it does not send."""
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        held, stands = self.go.with_suffix(".wanted"), self.go.with_suffix(".stands")
        while not held.exists() or stands.read_text() != "waiting for L2.c0.I.dispatch":
            assert time.monotonic() < deadline_s, "the ranks did not reach the op"
            time.sleep(0.05)


def last_line(result: launch.RankResult) -> str:
    assert "Traceback" not in result.output
    return result.output.splitlines()[-1]


def test_ranks_with_different_plans_are_refused(token_data, tmp_path):
    """Each rank has its own command line here, as when a launcher passes the wrong one to a node."""
    arguments = command_line(token_data, [*EP2, "--train-iters", "2"])
    chunks = "--lancet-num-chunks"
    per_rank = [["--lancet-plan", "off"], [chunks, "2"], [chunks, "2"], [chunks, "4"]]
    results = launch.run(SCRIPT, arguments, 4, tmp_path, ENDS_WITHIN_S, per_rank=per_rank)
    assert [result.returncode for result in results] == [2] * 4
    for result in results:
        assert last_line(result) == (
            "error: ranks disagree about the plan, and would wait for each other forever: "
            "ranks 1-3: overlap by a plan, rank 0: no plan; "
            "segments[0].num_chunks is 2 on ranks 1-2, 4 on rank 3; dw_window is 4 on ranks 1-2, 8 on rank 3. "
            "Start all ranks with the same arguments and the same files."
        )
        assert "] iteration " not in result.output


def test_ranks_that_disagree_about_nodes_are_refused(token_data, tmp_path):
    """Without the flag the launcher's number counts: one node of four ranks, in which there is nothing to hop over."""
    arguments = command_line(token_data, ["--expert-model-parallel-size", 4, "--train-iters", 2])
    nodes = ["--lancet-ranks-per-node", "2"]
    results = launch.run(SCRIPT, arguments, 4, tmp_path, ENDS_WITHIN_S, per_rank=[[], [], nodes, nodes])
    assert [result.returncode for result in results] == [2] * 4
    for result in results:
        assert last_line(result) == (
            "error: ranks disagree about which of them share a node: no two hops on ranks 0-1, 2 nodes x 2 ranks on "
            "ranks 2-3. Pass --lancet-ranks-per-node N to all ranks, the number of them that are started on each node, "
            "or choose a plan without two hops (--lancet-dispatch plain or dedup)."
        )
        assert "] iteration " not in result.output


def test_rank_killed_during_an_all_to_all_ends_the_others(token_data, tmp_path):
    """Chunk 0's rows are on the wire, chunk 1's never will be. Its counts may be lost on the way, too."""
    with Ranks(token_data, tmp_path, "kill@L2.c1.F.dispatch") as ranks:
        results = ranks.results()
    assert [result.returncode for result in results] == [1, -signal.SIGKILL]
    assert re.match(
        r"error: rank 0 gave up on L2\.c([01])\.F\.(counts|dispatch) \(layer 2, chunk \1, forward, \2\): "
        r"rank 1 closed the connection\.",
        last_line(results[0]),
    )


@pytest.mark.alone
def test_stopped_rank_ends_the_others_by_timeout(token_data, tmp_path):
    """It keeps its connections, so only the timeout tells. What it had issued before may not be on the wire yet."""
    with Ranks(token_data, tmp_path, "stop@L2.c0.F.counts") as ranks:
        (result,) = ranks.results(num_ranks=1)
    assert result.returncode == 1
    assert re.match(
        r"error: rank 0 gave up on (L2\.c0\.F\.counts \(layer 2, chunk 0, forward, counts\)|"
        r"L1\.c1\.F\.combine \(layer 1, chunk 1, forward, combine\)): "
        rf"rank 1 sent nothing for {SILENCE_S} s\.",
        last_line(result),
    )


def test_rank_that_loads_data_forever_ends_the_others(token_data, tmp_path):
    """It lives, and answers the system; only what it owes the others tells."""
    with Ranks(token_data, tmp_path, "loop@data") as ranks:
        (result,) = ranks.results(num_ranks=1)
    assert result.returncode == 1
    assert re.match(
        rf"error: rank 0 gave up on L1\.c0\.F\.(counts|dispatch) .*: rank 1 sent nothing for {SILENCE_S} s\.",
        last_line(result),
    )


def test_ctrl_c_ends_all_ranks_during_a_step(token_data, tmp_path):
    """As a terminal does it: SIGINT to every process. Rank 0 waits inside a collective."""
    with Ranks(token_data, tmp_path, "hold@L2.c0.I.dispatch", "--distributed-timeout-minutes", "10") as ranks:
        ranks.wait_until_held()
        for process in ranks.processes:
            process.send_signal(signal.SIGINT)
        results = ranks.results()
    assert [result.returncode for result in results] == [130, 130]
    for rank, result in enumerate(results):
        assert last_line(result).startswith(f"error: SIGINT ended rank {rank}, 1 steps done, ")
    assert re.search(r"waiting for L2\.c0\.I\.dispatch \(layer 2, chunk 0, .*\) from rank 1$", last_line(results[0]))
    assert "past L2.c" in last_line(results[1])


def test_ctrl_c_on_one_rank_ends_the_other(token_data, tmp_path):
    """Also where a data loader's worker holds copies of the connections."""
    with Ranks(token_data, tmp_path, "hold@L2.c0.I.dispatch", "--num-workers", "1") as ranks:
        ranks.wait_until_held()
        ranks.processes[0].send_signal(signal.SIGINT)
        (first,) = ranks.results(num_ranks=1)
        ranks.go.touch()
        second = ranks.results()[1]
    assert first.returncode == 130
    assert last_line(first).startswith("error: SIGINT ended rank 0, 1 steps done, waiting for L2.c")
    assert second.returncode == 1
    assert re.match(
        r"error: rank 1 gave up on L2\.c([01])\.I\.(\w+) \(layer 2, chunk \1, backward \(input gradient\), \2\): "
        r"rank 0 closed the connection\.",
        last_line(second),
    )


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory, token_data):
    """Runs in which rank 1's activations become NaN in step 2, in stock and in the overlapping model."""

    def run(*extra: str, save: Sequence[Path | None] = (None, None)) -> tuple[list[launch.RankResult], ...]:
        both = []
        for plan, checkpoints in zip(("off", "auto"), save, strict=True):
            folder = tmp_path_factory.mktemp(plan)
            saving = ["--save", str(checkpoints), "--save-interval", "1000"] if checkpoints is not None else []
            with Ranks(token_data, folder, "nan", "--lancet-plan", plan, *extra, *saving) as ranks:
                both.append(ranks.results())
        return tuple(both)

    return run


def test_nan_activations_are_found_as_in_stock(with_nan, tmp_path):
    """Megatron reruns the step, finds the same NaN again, saves a checkpoint and ends all ranks."""
    folders = [tmp_path / "stock", tmp_path / "ours"]
    stock, ours = with_nan(save=folders)
    # Of the step before the one with NaN.
    assert [(folder / "latest_checkpointed_iteration.txt").read_text() for folder in folders] == ["1", "1"]
    saved = [{path.relative_to(folder) for path in folder.rglob("*")} for folder in folders]
    assert saved[1] == saved[0]
    for results in (stock, ours):
        assert [result.returncode for result in results] == [EXIT_CODE_RESUME_TO_DISAMBIGUATE] * 2
        assert "found NaN in local forward loss calculation" in results[1].output


def test_unchecked_nan_activations_pass_as_in_stock(with_nan):
    stock, ours = with_nan("--no-check-for-nan-in-loss-and-grad")
    launch.check(stock)
    launch.check(ours)
    logged = [parse_log(results[1].output) for results in (stock, ours)]
    assert len(logged[1]) == 3
    for expected, row in zip(*logged, strict=True):
        assert row.keys() == expected.keys()  # the log leaves the losses out where they are not numbers
        for name in ("number of skipped iterations", "number of nan iterations"):
            assert row[name] == expected[name]
    assert "lm loss" in logged[1][0]
    assert "lm loss" not in logged[1][1]


PEERS_WORKER = launch.REPO / "tests/faults/peers_worker.py"
HOPS = {"node_dispatch": "kill", "local_dispatch": "stop", "local_combine": "kill", "node_combine": "stop"}
"""Messages, and the fault that the last rank meets before each of them."""


def outputs_beside(processes: Sequence[Rank], folder: Path) -> list[str]:
    """What all ranks but the last one, which meets a fault, have printed."""
    try:
        results = launch.finish(processes[:-1], folder, ENDS_WITHIN_S)
    finally:
        processes[-1].kill()
        processes[-1].wait()
    assert [result.returncode for result in results] == [1] * len(results)
    return [result.output for result in results]


@pytest.mark.alone
def test_error_names_the_silent_rank_among_several_peers(tmp_path):
    """Among three ranks, messages between the two that are left fail, too."""
    what = {"kill": "closed the connection", "stop": "sent nothing for 3 s"}
    started = {fault: launch.start(PEERS_WORKER, [fault], 3, tmp_path / fault) for fault in what}
    for fault, processes in started.items():
        for rank, output in enumerate(outputs_beside(processes, tmp_path / fault)):
            line = f"rank {rank} gave up on L2.c0.F.combine (layer 2, chunk 0, forward, combine): rank 2 {what[fault]}."
            assert line in output


@pytest.mark.alone
def test_error_in_a_hop_names_the_silent_rank(tmp_path):
    """Rank 0 is not connected to rank 3, but to ranks 1 and 2, which are."""
    started = {kind: launch.start(PEERS_WORKER, [fault, kind], 4, tmp_path / kind) for kind, fault in HOPS.items()}
    for kind, processes in started.items():
        what = "closed the connection" if HOPS[kind] == "kill" else "sent nothing for 3 s"
        for rank, output in enumerate(outputs_beside(processes, tmp_path / kind)):
            op = rf"L([23])\.c0\.F\.({'|'.join(HOPS)}) \(layer \1, chunk 0, forward, \2\)"
            assert re.search(rf"rank {rank} gave up on {op}: rank 3 {what}\.", output), (kind, output)

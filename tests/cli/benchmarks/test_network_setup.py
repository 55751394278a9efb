"""What the network benchmark asks of the machine and of its command line, without a network."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.demo.links.link import PacedLink
from benchmarks.harness import ranks, runner
from benchmarks.harness.job import read_job
from benchmarks.harness.namespaces import CommandError, Namespaces, check_host, run_command, shaping_command
from benchmarks.harness.origin import origin
from benchmarks.network.__main__ import make_job, parse_arguments
from benchmarks.network.cases import CASES, PRESETS, VARIANTS, choose, with_references
from megatron_lancet.errors import UsageError
from tests import te_cpu

REPO = Path(__file__).parents[3]
BOTH_TOOLS = ("ip", "tc")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (("Darwin", 0, BOTH_TOOLS, [0, 1]), ["Linux", "Darwin"]),
        (("Linux", 1000, BOTH_TOOLS, [0, 1]), ["root", "1000", "sudo make bench-network"]),
        (("Linux", 0, ("ip",), [0, 1]), ["tc", "apt install iproute2"]),
        (("Linux", 0, (), [0, 1]), ["ip and tc"]),
        (("Linux", 0, BOTH_TOOLS, [3]), ["the network benchmark needs 2 cores", "may use 1"]),
    ],
)
def test_a_host_that_lacks_something_is_told_what(host, words):
    with pytest.raises(UsageError) as refused:
        check_host(*host)
    assert all(word in str(refused.value) for word in words)


def test_a_host_that_has_everything_is_accepted():
    check_host("Linux", 0, BOTH_TOOLS, [4, 7])


class FakeCommands:
    """Records commands and keeps the list of namespaces; one of them may fail."""

    def __init__(self, failing: str = "never", existing: tuple[str, ...] = ()) -> None:
        self.commands: list[str] = []
        self.existing = list(existing)
        self._failing = failing

    def __call__(self, command):
        text = " ".join(command)
        self.commands.append(text)
        if self._failing in text:
            raise CommandError(f"`{text}`: Operation not supported")
        match command:
            case ["ip", "netns", "list"]:
                return "".join(f"{name} (id: 0)\n" for name in self.existing)
            case ["ip", "netns", "add", name]:
                self.existing.append(name)
            case ["ip", "netns", "del", name]:
                self.existing.remove(name)
        return ""


def test_two_namespaces_hold_everything_and_are_removed():
    run = FakeCommands()
    with Namespaces(run, process_id=77):
        assert run.existing == ["lancet-77-0", "lancet-77-1"]
    assert run.existing == []
    changing = [command for command in run.commands if command != "ip netns list"]
    assert all("lancet-77-" in command for command in changing), "a command without a namespace changes the host's"
    shaped = [command for command in changing if "tbf" in command]
    assert len(shaped) == 2
    assert all("dev veshaped" in command for command in shaped)


def test_ranks_of_a_node_share_its_namespace_and_its_addresses():
    run = FakeCommands()
    with Namespaces(run, process_id=77, ranks_per_node=2) as network:
        assert run.existing == ["lancet-77-0", "lancet-77-1"]
        assert [network.command(rank, ["true"])[3] for rank in range(network.num_ranks)] == [
            *["lancet-77-0"] * 2,
            *["lancet-77-1"] * 2,
        ]
    given = [command.split()[5:8:2] for command in run.commands if " addr add " in command]
    assert given == [
        [f"10.{net}.0.{node + 1}/24", interface]
        for net, interface in ((77, "veshaped"), (78, "vefree"))
        for node in (0, 1)
    ]


@pytest.mark.parametrize("failing", ["netns add lancet-77-1", "type veth", "tbf"])
def test_what_the_kernel_lacks_is_said_and_nothing_is_left(failing):
    run = FakeCommands(failing)
    with (
        pytest.raises(UsageError, match=r"can't make the test network: .*Operation not supported.*veth.*tbf"),
        Namespaces(run, process_id=77),
    ):
        pass
    assert run.existing == []


def test_an_error_inside_leaves_nothing():
    run = FakeCommands()
    with pytest.raises(RuntimeError, match="inside"), Namespaces(run, process_id=77):
        raise RuntimeError("inside")
    assert run.existing == []


def test_abandoned_namespaces_go_and_others_stay():
    never_a_process = 2**22 + 1
    run = FakeCommands(existing=("theirs", f"lancet-{never_a_process}-0", "lancet-1-0"))
    with Namespaces(run, process_id=77):
        pass
    assert run.existing == ["theirs", "lancet-1-0"], "process 1 lives, and what is not ours is not ours"


def test_the_burst_grows_with_the_rate_and_holds_a_whole_segment():
    def burst(rate_bps: float) -> int:
        command = shaping_command("veshaped", rate_bps)
        return int(command[command.index("burst") + 1])

    assert burst(1e8) == 70_000
    assert burst(8e9) == 250_000
    assert "rate 300000000bit" in " ".join(shaping_command("veshaped", 3e8))


def test_a_failing_command_says_what_it_printed():
    with pytest.raises(CommandError, match="`sh -c echo no >&2; exit 3`: no"):
        run_command(["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(CommandError, match="no-such-tool"):
        run_command(["no-such-tool"])


class Runs:
    """Runs no ranks; remembers what each group of them was to measure, and writes its result. One of them may fail."""

    def __init__(self, failing: int = 0) -> None:
        self.seen: list[tuple[int, list[str]]] = []
        self._failing = failing

    def __call__(self, network, _module, arguments, *_others) -> None:
        job = read_job(Path(arguments[1]))
        self.seen.append((network.num_ranks, [case.name for case in job.cases]))
        job.result.write_text(json.dumps({"cases": [{"name": job.cases[0].name}]}))
        if network.num_ranks == self._failing:
            raise ranks.RankError("failed")


@pytest.mark.parametrize(("failing", "measured"), [(0, ["45", "nodes-top4"]), (2, ["45"]), (4, ["45", "nodes-top4"])])
def test_each_number_of_ranks_has_its_processes_and_results(failing, measured, monkeypatch):
    run = Runs(failing)
    monkeypatch.setattr(runner, "check_host", lambda *_: None)
    monkeypatch.setattr(runner, "Namespaces", partial(Namespaces, FakeCommands(), 77))
    monkeypatch.setattr(runner, "run_ranks", run)
    arguments = parse_arguments(["--cases", "nodes-top8", "nodes-top4", "45", "20"])
    found, ended_by = runner.measure_in_network("network", partial(make_job, arguments), 50, False)
    assert [case["name"] for case in found["cases"]] == measured
    assert run.seen == [(2, ["45", "20"]), (4, ["nodes-top4", "nodes-top8"])][: len(measured)]
    assert (ended_by is None) is (failing == 0)


class NoNamespaces:
    """Runs rank's commands where they are; ``python -m worker`` becomes the rank's own script."""

    ranks_per_node = 1

    def __init__(self, *scripts: str) -> None:
        self._scripts = scripts
        self.num_ranks = len(scripts)

    def command(self, rank, _command):
        return [sys.executable, "-c", self._scripts[rank]]


def test_ranks_have_their_place_on_a_node_and_share_cores(tmp_path):
    placed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [[ranks.rank_environment(rank, ranks_per_node=2)[name] for name in placed] for rank in range(4)]
    assert found == [["0", "4", "0", "2"], ["1", "4", "1", "2"], ["2", "4", "0", "2"], ["3", "4", "1", "2"]]
    commands = []

    class Remembered(NoNamespaces):
        def command(self, rank, command):
            commands.append(command[-2:])
            return super().command(rank, command)

    ranks.run_ranks(Remembered(*["pass"] * 4), "worker", [], [5, 7], tmp_path, 50)
    assert commands == [["--core", core] for core in ("5", "7", "5", "7")]


def test_the_first_rank_that_fails_ends_the_other_and_is_shown(tmp_path):
    waits = "import time; time.sleep(60)"
    fails = "import sys; print('the reason', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ranks.RankError, match=r"rank 1 ended with exit status 3(.|\n)*the reason"):
        ranks.run_ranks(NoNamespaces(waits, fails), "worker", [], [0, 1], tmp_path, 50)


def test_a_rank_that_is_killed_is_shown_with_its_signal(tmp_path):
    killed = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(ranks.RankError, match="rank 0 was ended by signal 9"):
        ranks.run_ranks(NoNamespaces(killed, "pass"), "worker", [], [0, 1], tmp_path, 50)


def test_ranks_that_take_too_long_are_ended_with_their_stacks(tmp_path):
    waits = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); time.sleep(60)"
    with pytest.raises(ranks.RankError, match=r"not done after 5 s(.|\n)*rank 1\n(.|\n)*File"):
        ranks.run_ranks(NoNamespaces(waits, waits), "worker", [], [0, 1], tmp_path, 5)


def test_a_rank_that_ignores_sigterm_is_killed():
    stubborn = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    ranks.end(process)
    assert process.returncode == -signal.SIGKILL


def test_an_earlier_result_of_the_day_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    assert runner.output_path("network", "2026-12-01", None) == tmp_path / "network-2026-12-01"
    (tmp_path / "network-2026-12-01.json").touch()
    with pytest.raises(UsageError, match=r"network-2026-12-01\.json is the result of an earlier run\. Pass --output"):
        runner.output_path("network", "2026-12-01", None)
    given = tmp_path / "network-2026-12-01"
    assert runner.output_path("network", "2026-12-01", given) == given


def test_paced_ranks_meet_below_the_ports_of_the_kernel():
    port = int(PacedLink("asked for").rendezvous()["MASTER_PORT"])
    assert 20_000 <= port < 32_000


def test_each_variant_comes_with_what_it_is_compared_with():
    assert with_references({"sequence-k2"}) == ("stock-sdpa", "stock-sdpa-free", "sequence-k2")
    (case,) = choose(["45"], ["all-k4"])
    assert case.variants == ("stock", "all-k4", "stock-free")
    for case in CASES.values():
        assert set(with_references(set(case.variants) | {case.baseline})) == set(case.variants)
        first = VARIANTS[with_references(set(case.variants))[0]]
        assert first.plan is None, "the first variant of a case is what the others' gradients are compared with"


def test_case_with_more_micro_batches_can_have_megatrons_overlap(tmp_path):
    arguments = parse_arguments(["--cases", "20", "--variants", "megatron-overlap", "--micro-batches", "4"])
    (case,) = make_job(arguments, [0, 1], tmp_path / "result.json").cases
    assert case.variants == ("stock", "megatron-overlap", "stock-free")
    assert case.shape.micro_batches == 4


@pytest.mark.parametrize("default_malloc", [False, True])
def test_ranks_keep_freed_memory_unless_the_default_is_asked_for(default_malloc, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    environment = ranks.rank_environment(1, default_malloc)
    settings = origin("benchmarks.network", [], environment)["settings"]
    assert settings["MALLOC_ARENA_MAX"] == settings["OMP_NUM_THREADS"] == "1"
    assert ("MALLOC_TRIM_THRESHOLD_" in settings) is not default_malloc


def exact_variants(topk: int) -> set[str]:
    """Those of ours whose gradients are stock's to the bit."""
    return {name for name, variant in VARIANTS.items() if variant.plan and variant.is_exact(topk)}


def test_variants_that_sum_as_stock_are_compared_to_the_bit():
    of_one_row = {"dedup-k1", "two-hop-k1", "placed-k1", "paired-dedup-k1"}
    assert exact_variants(1) == {"paired-k1", "paired-k1-none", "dw-only", *of_one_row}
    assert exact_variants(2) - exact_variants(4) == of_one_row, "ranks sum up to four outputs"


def test_variants_of_every_preset_are_known(tmp_path):
    for preset in PRESETS:
        job = make_job(parse_arguments([f"--{preset}"]), [0, 1], tmp_path / "result.json")
        assert job.cases
        assert all(set(case.variants) <= set(VARIANTS) for case in job.cases)


def test_cases_with_as_many_ranks_share_processes_and_a_result(tmp_path):
    names = ["--cases", "nodes-top4", "20", "45", "nodes-top8"]
    parts = make_job(parse_arguments(names), [0, 1], tmp_path / "result.json").by_processes()
    assert [(job.ranks_per_node, [case.name for case in job.cases]) for job in parts] == [
        (1, ["45", "20"]),
        (2, ["nodes-top4", "nodes-top8"]),
    ]
    assert len({job.result for job in parts}) == 2


def test_layers_of_te_have_processes_of_their_own(tmp_path):
    arguments = parse_arguments(["--cases", "45-m4", "45-te-m4", "45-m8"])
    parts = make_job(arguments, [0, 1], tmp_path / "result.json").by_processes()
    found = [(job.has_te, [case.name for case in job.cases]) for job in parts]
    assert found == [(False, ["45-m4", "45-m8"]), (True, ["45-te-m4"])]
    assert len({job.result for job in parts}) == 2


def test_a_case_with_transformer_engine_needs_its_python(tmp_path, monkeypatch):
    monkeypatch.setattr(te_cpu, "SITE", tmp_path)
    with pytest.raises(UsageError, match=rf"45-te-m4 .* is not in {tmp_path}\. Run tools/setup_te\.sh \.venv"):
        make_job(parse_arguments(["--cases", "45-te-m4"]), [0, 1], tmp_path / "result.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats must be positive, not 0"),
        (["--rate", "-3"], "--rate must be positive, not -3"),
        (["--cases", "99"], r"no case 99. Known: 45, 45-accumulated, 20"),
        (["--variants", "al-k2"], r"no variant al-k2. Known: stock"),
        (
            ["--cases", "45", "--variants", "megatron-overlap"],
            r"megatron-overlap overlaps two micro-batches, and a step of case 45 has 1\. Pass --cases 45-accumulated",
        ),
        (["--cases", "45", "--variants", "paired-k1"], "paired-k1 overlaps two micro-batches"),
        (["--cases", "45-accumulated", "--micro-batches", "1"], "a step of case 45-accumulated has 1"),
        (
            ["--cases", "45", "--variants", "dedup-k2"],
            r"dedup-k2 sends .* in case 45 a token has one expert .*\. Pass --cases 45-top4\.",
        ),
        (
            ["--cases", "45-top4", "--variants", "two-hop-k2"],
            r"two-hop-k2 sends a token once to a node, .* 45-top4 a node has one rank.*Pass --cases nodes-top4\.",
        ),
        (
            ["--cases", "45-m4", "--variants", "megatron-overlap-delay-wgrad"],
            r"-delay-wgrad needs Transformer Engine layers, but case 45-m4 has Megatron's.*Pass --cases 45-te-m4\.",
        ),
        (
            ["--cases", "45-te-m4", "--variants", "sequence-k2"],
            r"variant stock-sdpa changes the attention .* case 45-te-m4 has Transformer Engine layers",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        make_job(parse_arguments(arguments), [0, 1], tmp_path / "result.json")


def test_a_job_survives_its_file(tmp_path):
    arguments = parse_arguments(["--cases", "skewed", "45", "--rate", "300", "--layers", "1"])
    job = make_job(arguments, [2, 3], tmp_path / "result.json")
    job.write(tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
    assert job.rate_bps == 3e8
    assert [case.shape.layers for case in job.cases] == [1, 1]
    assert job.cases[1].shape.expert_shares() == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_the_command_refuses_in_one_line_and_with_status_2():
    command = [sys.executable, "-m", "benchmarks.network", "--sweeps", "0"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: --sweeps must be positive, not 0.\n"

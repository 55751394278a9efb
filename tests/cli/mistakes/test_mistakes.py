"""Mistakes of a first day: each ends in seconds with one line that begins with "error:", and without a traceback."""

import json
import logging
import socket
import sys

import pytest

from megatron_lancet.cli import scripts
from megatron_lancet.cli.commands import COMMANDS as ALL_COMMANDS
from tests.cli.mistakes.cases import COMMANDS, TRAININGS, WITHOUT_ARGUMENTS
from tests.cli.mistakes.play import flaws, make_files, play_all

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def files(tmp_path_factory, token_data):
    """Files that the mistakes name, and a port on which somebody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield make_files(tmp_path_factory.mktemp("files"), token_data, taken.getsockname()[1])


@pytest.fixture(scope="module")
def trainings(files, tmp_path_factory):
    """How each training of :data:`TRAININGS` ended."""
    return play_all(TRAININGS, files, tmp_path_factory.mktemp("trainings"), is_training=True)


@pytest.fixture(scope="module")
def commands(files, tmp_path_factory):
    """How each command of :data:`COMMANDS` ended."""
    return play_all(COMMANDS, files, tmp_path_factory.mktemp("commands"), is_training=False)


@pytest.mark.parametrize("name", TRAININGS)
def test_training_answers_a_mistake_in_one_line(trainings, files, name):
    assert flaws(TRAININGS[name], trainings[name], files) == [], trainings[name].output


@pytest.mark.parametrize("words", COMMANDS)
def test_command_answers_a_mistake_in_one_line(commands, files, words):
    end = commands[words]
    assert flaws(COMMANDS[words], end, files) == [], end.output
    others = [line for line in end.output.splitlines() if not line.startswith("the launch has 2 ranks (torchrun")]
    assert len(others) == 1 or COMMANDS[words].status == 0


def test_every_command_is_played_without_arguments():
    assert set(WITHOUT_ARGUMENTS) == set(ALL_COMMANDS)


def test_explanation_says_which_network_it_assumes(files, tmp_path, capsys, monkeypatch):
    plan = tmp_path / "plan.json"
    network = ["--ranks-per-node", "2", "--intra-gbps", "3600", "--inter-gbps", "0.4"]
    for words in (
        ["plan", "make", files["profile"], "--output", plan, *network],
        ["plan", "explain", plan, "--profile", files["profile"]],
    ):
        monkeypatch.setattr(sys, "argv", ["lancet", *map(str, words)])
        scripts.main()
    explained = capsys.readouterr().out
    predicted_ms = json.loads(plan.read_text())["prediction"]["step_ms"]
    assert "network: as profiled: a rank sends at" in explained
    assert f"note: the plan file predicts {predicted_ms:.1f} ms, so it was made for another network" in explained


@pytest.mark.parametrize(("text", "is_shown"), [("No CUDA runtime is found, using '%s'", False), ("other", True)])
def test_missing_cuda_runtime_is_no_warning(text, is_shown):
    """torch warns in every process on a machine without a GPU, and a run says which device it found."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    record = logger.makeRecord(logger.name, logging.WARNING, "cpp_extension.py", 1, text, (), None)
    assert bool(logger.filter(record)) == is_shown

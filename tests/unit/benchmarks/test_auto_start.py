"""The checkpoint from which all variants of a whole training start: trained once for the same flags and data."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.auto.start import START_STEPS, checkpoint, resumed
from megatron_lancet.errors import UsageError


class Trainings:
    """Notes the flags of each training; its ranks save as Megatron does, unless they fail."""

    def __init__(self):
        self.flags = []
        self.fails = False

    @contextmanager
    def __call__(self, flags, log):
        self.flags.append(flags)
        yield SimpleNamespace(wait_until_ready=lambda: None, run=self.run, finish=self.finish)

    def run(self, steps, on_step):
        assert steps == range(1, START_STEPS + 1)
        if self.fails:
            raise UsageError("start ended early")

    def finish(self):
        flags = self.flags[-1]
        Path(flags[flags.index("--save") + 1], "latest_checkpointed_iteration.txt").write_text(str(START_STEPS))


def test_same_flags_and_data_train_once(tmp_path):
    job = Trainings()
    first = checkpoint(job, ["--seed", "1"], "corpus", tmp_path, tmp_path)
    assert checkpoint(job, ["--seed", "1"], "corpus", tmp_path, tmp_path) == first
    assert len(job.flags) == 1
    assert resumed(first)[:2] == ["--load", str(first)]
    others = {
        checkpoint(job, ["--seed", seed], data, tmp_path, tmp_path) for seed, data in (("2", "corpus"), ("1", ""))
    }
    assert len({first, *others}) == len(job.flags) == 3


def test_failed_training_is_no_checkpoint(tmp_path):
    job = Trainings()
    job.fails = True
    with pytest.raises(UsageError, match="ended early"):
        checkpoint(job, [], "corpus", tmp_path, tmp_path)
    job.fails = False
    checkpoint(job, [], "corpus", tmp_path, tmp_path)
    assert len(job.flags) == 2

"""How a rank of a training prints, and which closed pipes end it."""

import os

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lancet import errors
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.report_folder import check_report_folder
from megatron_lancet.training.process.console import say


@pytest.mark.parametrize("rank", [0, 1])
def test_first_rank_is_by_process_groups(rank, monkeypatch, tmp_path, capsys):
    """Megatron-Bridge reads the rank from SLURM's variables; ``RANK`` is then missing on all ranks."""
    monkeypatch.delenv("RANK", raising=False)
    file = tmp_path / "file"
    file.touch()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        say("a line")
        if rank == 0:
            with pytest.raises(UsageError, match="expected a folder"):
                check_report_folder(file)
        else:
            check_report_folder(file)  # only rank 0 writes
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().out == ("a line\n" if rank == 0 else "")


def test_broken_pipe_elsewhere_is_an_error_as_any_other():
    """Such as one to a data loader's worker, or to a checkpoint's writer."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        with pytest.raises(BrokenPipeError):
            run_command(lambda: os.write(write_end, b"text"))
    finally:
        os.close(write_end)


def test_closed_pipe_is_seen_without_a_buffer(monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr(errors, "_OUTPUTS", (write_end,))
    assert not errors._is_an_output_closed()
    os.close(read_end)
    assert errors._is_an_output_closed()
    os.close(write_end)

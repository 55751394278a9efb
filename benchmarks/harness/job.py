"""What the runner asks of the ranks, as a file."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.cases import Case
from megatron_lancet.files import from_plain, to_plain


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        repeats: interleaved steps of each variant in a sweep.
        sweeps: of each case.
        rate_bps: rate of the shaped link, in bits per second; None sets it by what a case's baseline exposes.
        cores: of the ranks.
        result: where rank 0 writes what was measured.
        timelines: folder that gets timelines of each variant, where the benchmark traces them; None for none.
    """

    cases: list[Case]
    repeats: int
    sweeps: int
    rate_bps: float | None
    cores: list[int]
    result: Path
    timelines: Path | None = None

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        paths = {"result": str(self.result), "timelines": None if self.timelines is None else str(self.timelines)}
        path.write_text(json.dumps({**to_plain(self), **paths}))


def read_job(path: Path) -> Job:
    """Read what :meth:`Job.write` wrote."""
    fields = json.loads(path.read_text())
    timelines = fields.pop("timelines")
    return Job(
        **{
            **fields,
            "cases": [from_plain(Case, case, f"{path}: case") for case in fields["cases"]],
            "result": Path(fields["result"]),
            "timelines": None if timelines is None else Path(timelines),
        }
    )

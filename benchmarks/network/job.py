"""What the runner asks of the ranks, as a file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.network.cases import Case, Shape


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        repeats: interleaved steps of each variant in a sweep.
        rate_bps: rate of the shaped link, in bits per second; None sets it by what stock exposes.
        cores: of the ranks.
        result: where rank 0 writes what was measured.
    """

    cases: list[Case]
    repeats: int
    sweeps: int
    rate_bps: float | None
    cores: list[int]
    result: Path

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({**asdict(self), "result": str(self.result)}))


def read_job(path: Path) -> Job:
    """Read what :meth:`Job.write` wrote."""
    fields = json.loads(path.read_text())
    cases = [
        Case(**{**case, "shape": Shape(**case["shape"]), "variants": tuple(case["variants"])})
        for case in fields.pop("cases")
    ]
    return Job(**{**fields, "cases": cases, "result": Path(fields["result"])})

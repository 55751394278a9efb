"""What the runner asks of the ranks, as a file."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.cases import Case
from megatron_lancet.files.reader import from_plain
from megatron_lancet.files.records import to_plain


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
        data: folder with the data sets of a benchmark that needs some; None for none.
    """

    cases: list[Case]
    repeats: int
    sweeps: int
    rate_bps: float | None
    cores: list[int]
    result: Path
    timelines: Path | None = None
    data: Path | None = None

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node of all its cases; see :meth:`by_processes`."""
        (number,) = {case.ranks_per_node for case in self.cases}
        return number

    @property
    def has_te(self) -> bool:
        """Whether its processes have Transformer Engine, which Megatron looks up at import."""
        (has_te,) = {case.shape.te for case in self.cases}
        return has_te

    def by_processes(self) -> list["Job"]:
        """Splits the job into parts, each with its own processes and result file.

        All cases of a part have the same number of ranks, and either all or none have Transformer Engine.
        """

        def needs(case: Case) -> tuple[int, bool]:
            return case.ranks_per_node, case.shape.te

        return [
            replace(
                self,
                cases=[case for case in self.cases if needs(case) == wanted],
                result=self.result.with_name(f"{number}-{self.result.name}"),
            )
            for number, wanted in enumerate(sorted(set(map(needs, self.cases))))
        ]

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        folders = {"timelines": self.timelines, "data": self.data}
        paths = {name: None if folder is None else str(folder) for name, folder in folders.items()}
        path.write_text(json.dumps({**to_plain(self), "result": str(self.result), **paths}))


def read_job(path: Path) -> Job:
    """Read what :meth:`Job.write` wrote."""
    fields = json.loads(path.read_text())
    folders = {name: fields.pop(name) for name in ("timelines", "data")}
    return Job(
        **{
            **fields,
            "cases": [from_plain(Case, case, f"{path}: case") for case in fields["cases"]],
            "result": Path(fields["result"]),
            **{name: None if folder is None else Path(folder) for name, folder in folders.items()},
        }
    )

"""The flags of a dry run. Without Megatron, because the entry point reads them first."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lancet.errors import UsageError
from megatron_lancet.flags import CheckedFlags, flag, flags_of


@dataclass(frozen=True)
class DryRunConfig(CheckedFlags):
    """Whether the run only validates its command line, and for how many ranks.

    Raises:
        UsageError: a value is outside the range of its flag, or a world size is given to a run that is no dry run.
    """

    dry_run: bool = flag(
        False,
        parsed_as=bool,
        unchecked="",
        help="validate the command line as for a cluster with GPUs, print model size, parallel layout, memory per "
        "GPU and plan, and exit: needs one process, no GPU and no data. Missing files and packages are warnings; "
        "anything that the run would refuse is an error.",
    )
    world_size: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        metavar="N",
        unchecked="",
        help="with --lancet-dry-run: number of ranks. Default: WORLD_SIZE of the environment, else the fewest "
        "that the parallel sizes allow.",
    )
    gpu_memory_gb: float | None = flag(
        None,
        parsed_as=float,
        above=0,
        unit="10^9 bytes",
        metavar="GB",
        unchecked="",
        help="with --lancet-dry-run: memory of a GPU in 10^9 bytes, for the answer whether the job fits. Default: that "
        "of this machine's GPU, else an H100's.",
    )

    def __post_init__(self) -> None:
        if self.world_size is not None and not self.dry_run:
            raise UsageError(
                f"--lancet-world-size {self.world_size} is for --lancet-dry-run: a run gets its number of ranks from "
                "its launcher. Drop it."
            )
        if self.gpu_memory_gb is not None and not self.dry_run:
            raise UsageError(f"--lancet-gpu-memory-gb {self.gpu_memory_gb:g} is for --lancet-dry-run. Drop it.")
        super().__post_init__()


def is_dry_run(command_line: Sequence[str]) -> bool:
    """Whether a command line asks for a dry run, before it is parsed; Megatron's parser takes no abbreviations."""
    return next(name for name, entry, _ in flags_of(DryRunConfig) if entry.name == "dry_run") in command_line

"""Entry point of pretraining: checks versions and chooses the machine before Megatron is imported.

The training itself is in ``job.py``. This file imports little, because the processes that Megatron spawns during a
save import it first.
"""

import os
import sys
import warnings

from megatron_lancet.config import FLAGS_VARIABLE
from megatron_lancet.dry_run_flags import is_dry_run
from megatron_lancet.errors import UsageError
from megatron_lancet.training.megatron.versions import check_versions
from megatron_lancet.training.process.console import say
from megatron_lancet.training.process.exit import RankStatus, run_rank

_MISSING_OPTIONAL = r".*([Aa]pex|[Tt]ransformer[ -][Ee]ngine|transformer-engine|absl).*"
"""Megatron warns about each optional package on import, on every rank; all of them are optional here."""


def main() -> None:
    """Entry point of ``pretrain_gpt_moe.py`` and of the console script."""
    run_rank(_main)


def _main(status: RankStatus) -> None:
    check_versions()
    warnings.filterwarnings("ignore", message=_MISSING_OPTIONAL, category=UserWarning)
    _refuse_flags_of_the_environment()
    # Imported only now, because this imports megatron, whose version has been checked.
    from megatron_lancet.registry import by_name, features
    from megatron_lancet.training.platform.detect import platform

    if is_dry_run(sys.argv):
        by_name("--lancet-dry-run")()
        return
    with platform() as found:
        say(f"Megatron-Lancet: {found.description}")
        from megatron_lancet.training.job import run_job

        run_job(found.device, status, features=features())


def _refuse_flags_of_the_environment() -> None:
    if os.environ.get(FLAGS_VARIABLE):
        raise UsageError(
            f"{FLAGS_VARIABLE} is for launchers with other parsers (docs/migration.md, docs/library.md). Here, "
            f"pass {os.environ[FLAGS_VARIABLE]} on the command line, and unset {FLAGS_VARIABLE}."
        )

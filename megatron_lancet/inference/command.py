"""The common frame of this package's commands: checks before, and exit after the work of a rank."""

import logging
import warnings
from collections.abc import Callable

from megatron_lancet.training.megatron.versions import check_versions
from megatron_lancet.training.process.exit import RankStatus, run_rank

_NOISY = ("megatron.core", "megatron.training", "torch.distributed.checkpoint")


def run_tool(main: Callable[[], None], doing: str) -> None:
    """Run a command as one rank; a failure of any rank ends it with one line and a nonzero status.

    Args:
        doing: what the command does, for the message after a signal.
    """

    def run(status: RankStatus) -> None:
        check_versions()
        # Megatron's warnings about optional packages and deprecated classes don't concern users of these commands.
        warnings.simplefilter("ignore")
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        status.describe = lambda: doing
        main()

    run_rank(run)

"""The frame of the commands of this package: what every rank of them does before and after its work."""

import logging
import warnings
from collections.abc import Callable

from megatron_lancet.training.megatron.versions import check_versions
from megatron_lancet.training.process.exit import RankStatus, run_rank

_NOISY = ("megatron.core", "megatron.training", "torch.distributed.checkpoint", "torch.utils.cpp_extension")


def run_tool(main: Callable[[], None], doing: str) -> None:
    """Run a command as one rank; a failure of any rank ends it with one line and a status that is not 0.

    Args:
        doing: what it does, for the line that says what a signal ended.
    """

    def run(status: RankStatus) -> None:
        check_versions()
        # Megatron's remarks on optional packages and deprecated classes are not what these commands are asked for.
        warnings.simplefilter("ignore")
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        status.describe = lambda: doing
        main()

    run_rank(run)

"""Transformer Engine layers in a benchmark's ranks: its own Python, with plain torch for its compiled kernels."""

from contextlib import AbstractContextManager

from megatron_lancet.errors import UsageError
from tests import te_cpu


def check_unpacked(case: str) -> None:
    """
    Args:
        case: name of a case that needs Transformer Engine.

    Raises:
        UsageError: its Python is not where ``make`` unpacks it.
    """
    if not (te_cpu.SITE / "transformer_engine").is_dir():
        raise UsageError(
            f"case {case} needs Transformer Engine, but its Python is not in {te_cpu.SITE}. "
            "Run tools/setup_te.sh .venv, as make does."
        )


def platform(has_te: bool) -> AbstractContextManager[None]:
    """Sets up Megatron for a CPU. Call it before anything imports Megatron.

    Args:
        has_te: make Transformer Engine available, with the tests' stand-ins for its kernels.
    """
    if has_te:
        te_cpu.install()
        return te_cpu.te_platform()
    from megatron_lancet.training.platform.cpu import cpu_platform

    return cpu_platform()

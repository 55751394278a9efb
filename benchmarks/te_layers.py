"""Layers of Transformer Engine in a benchmark's ranks: its own Python, and plain torch for its compiled kernels."""

from contextlib import AbstractContextManager

from megatron_lancet.errors import UsageError
from tests import te_cpu


def check_unpacked(case: str) -> None:
    """
    Args:
        case: the name of one that needs Transformer Engine.

    Raises:
        UsageError: its Python is not where ``make`` unpacks it.
    """
    if not (te_cpu.SITE / "transformer_engine").is_dir():
        raise UsageError(
            f"case {case} has layers of Transformer Engine, whose Python is not in {te_cpu.SITE}. "
            "Run tools/setup_te.sh .venv, as make does."
        )


def platform(has_te: bool) -> AbstractContextManager[None]:
    """Megatron's settings for a CPU. To be called before anything imports Megatron.

    Args:
        has_te: Megatron finds Transformer Engine, with the stand-ins of the tests for its kernels.
    """
    if has_te:
        te_cpu.install()
        return te_cpu.te_platform()
    from megatron_lancet.training.platform.cpu import cpu_platform

    return cpu_platform()

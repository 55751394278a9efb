"""Imports Megatron-Bridge, for processes that fork ranks and for programs that do not start there."""

import megatron.training  # before Bridge sees the stand-ins

from tests.bridge import gaps

with gaps.filled():
    import megatron.bridge  # noqa: F401

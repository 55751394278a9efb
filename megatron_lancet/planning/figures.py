"""Types of the figures in a profile, with the values that a file may hold."""

from typing import Annotated

from megatron_lancet.files.reader import MAX_COUNT, Range

_LARGEST = 10**15
"""Upper limit of times, sizes and factors."""
Count = Annotated[int, Range(0, MAX_COUNT)]
CountFrom1 = Annotated[int, Range(1, MAX_COUNT)]
Size = Annotated[int, Range(0, _LARGEST)]
SizeFrom1 = Annotated[int, Range(1, _LARGEST)]
Ms = Annotated[float, Range(0, _LARGEST)]
Factor = Annotated[float, Range(0, _LARGEST)]

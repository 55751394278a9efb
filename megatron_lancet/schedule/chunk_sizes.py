"""Sizes of the chunks of a micro-batch, the same in the model, the profiler and the simulator."""

from math import gcd


def multiple_along(token_multiple: int, tokens_per_unit: int) -> int:
    """Smallest number of units of a dimension whose tokens are a multiple of ``token_multiple``.

    Args:
        token_multiple: number that the tokens of each chunk must be a multiple of.
        tokens_per_unit: tokens of one sample (batch), or of one position in all samples (sequence).
    """
    return token_multiple // gcd(token_multiple, tokens_per_unit)


def most_chunks(size: int, multiple: int) -> int:
    """Most chunks that a dimension of ``size`` can be cut into; 1 if its size is no multiple itself."""
    return 1 if size % multiple else size // multiple


def chunk_sizes(size: int, num_chunks: int, multiple: int = 1) -> list[int]:
    """Sizes of the chunks of a dimension of ``size``, as equal as possible, larger ones first.

    Args:
        multiple: the sizes are multiples of this number, unless there is one chunk only.
    """
    if num_chunks == 1:
        return [size]
    assert num_chunks <= most_chunks(size, multiple), (size, num_chunks, multiple)
    base, rest = divmod(size // multiple, num_chunks)
    return [(base + (chunk < rest)) * multiple for chunk in range(num_chunks)]

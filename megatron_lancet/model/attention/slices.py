"""The slices of a sequence that a context-parallel rank has."""

from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron_lancet.errors import UsageError


def own_positions(num_positions: int, config: TransformerConfig) -> list[tuple[int, int]]:
    """First positions, and those behind the last ones, of a context-parallel rank's two slices of a sequence.

    Raises:
        UsageError: sequences can't be cut into slices of one size.
    """
    num_slices, rank = 2 * config.context_parallel_size, parallel_state.get_context_parallel_rank()
    if num_positions % num_slices:
        raise UsageError(
            f"a packed sequence of {num_positions} tokens can't be cut into {num_slices} slices of one size for "
            f"--context-parallel-size {config.context_parallel_size}. Pad it to a multiple."
        )
    size = num_positions // num_slices
    return [(number * size, (number + 1) * size) for number in (rank, num_slices - 1 - rank)]

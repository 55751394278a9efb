"""What rows in tiles do not work with."""

from typing import NamedTuple


class Unsupported(NamedTuple):
    """What a run has that does not work with tiles.

    Attributes:
        reason: a clause.
        advice: what to do about it, as an imperative.
    """

    reason: str
    advice: str


def tiles_unsupported(is_quantized: bool, has_row_bound: bool) -> Unsupported | None:
    """Why the rows of a model can't go to other ranks in tiles; None if they can.

    All else that a plan works with works with tiles, but for two hops, with which there is no such plan.

    Args:
        is_quantized: whether Transformer Engine's modules compute in fp8 or fp4.
        has_row_bound: whether the rows that a rank's experts work on at a time have a bound.
    """
    if is_quantized:
        return Unsupported(
            "fp8 and fp4 give each tile scales of its own, so that a weight gradient can't be one product over the "
            "rows of all tiles",
            "drop --fp8-format or --fp4-format",
        )
    if has_row_bound:
        return Unsupported(
            "--lancet-max-received-rows sends a chunk in rounds, which have no tiles", "drop --lancet-max-received-rows"
        )
    return None

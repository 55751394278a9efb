"""Settings of a model that do not work with tiles."""

from megatron_lancet.schedule.layout import Blocker


def model_blocker(is_quantized: bool, has_row_bound: bool = False) -> Blocker | None:
    """Why the rows of a model can't go to other ranks in tiles; None if they can.

    Args:
        is_quantized: whether Transformer Engine's modules compute in fp8 or fp4.
        has_row_bound: whether the rows that a rank's experts work on at a time have a bound.
    """
    if is_quantized:
        return Blocker(
            "fp8 and fp4 give each tile scales of its own, so that a weight gradient can't be one product over the "
            "rows of all tiles",
            is_evident=True,
            advice="drop --fp8-format or --fp4-format",
        )
    if has_row_bound:
        return Blocker(
            "--lancet-max-expert-rows sends a chunk in rounds, which have no tiles",
            is_evident=True,
            advice="drop --lancet-max-expert-rows",
        )
    return None

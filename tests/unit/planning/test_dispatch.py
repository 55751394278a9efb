"""Where deduplicated dispatch can be used."""

import pytest

from megatron_lancet.planning.dispatch import why_not_dedup


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ((1, 8, 4, False), "one expert-parallel rank"),
        ((2, 8, 1, False), "top-1"),
        ((8, 8, 2, False), "a rank has one expert"),
        ((2, 8, 4, True), "padded to capacity"),
        ((2, 0, 0, False), "no experts"),
        ((2, 8, 4, False), None),
        ((4, 8, 2, False), None),
    ],
)
def test_says_why_a_layout_has_nothing_to_deduplicate(layout: tuple[int, int, int, bool], reason: str | None) -> None:
    why_not = why_not_dedup(*layout)
    assert why_not is None if reason is None else why_not is not None and reason in why_not

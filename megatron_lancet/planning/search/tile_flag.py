"""Tiles as flags name them: a number of tiles, or ``experts:G`` for tiles by expert."""

from dataclasses import dataclass

from megatron_lancet.errors import UsageError
from megatron_lancet.schedule.dispatch import LocalTokens

_BY_EXPERT = "experts:"


@dataclass(frozen=True)
class TilesByExpert:
    """A tile for each group of local experts.

    Attributes:
        number: of groups.
    """

    number: int

    def __str__(self) -> str:
        return f"{_BY_EXPERT}{self.number}"


type Tiles = int | TilesByExpert


def read_tiles(flag: str, text: str) -> Tiles:
    """Reads the value of a flag.

    Raises:
        UsageError: the text names no tiles.
    """
    number = text.removeprefix(_BY_EXPERT)
    if not number.isdecimal() or (number != text and not int(number)):
        raise UsageError(
            f"{flag} expects auto, or a number of tiles, 0 for none, or {_BY_EXPERT}G for G groups of experts, got "
            f"{text}."
        )
    return int(number) if number == text else TilesByExpert(int(number))


def number_of(tiles: Tiles | None) -> int:
    """The number of tiles; 0 for none."""
    return tiles.number if isinstance(tiles, TilesByExpert) else tiles or 0


def local_tokens_of(tiles: Tiles | None) -> LocalTokens:
    """When experts work on local tokens in a fixed plan with these tiles."""
    return LocalTokens.BY_EXPERT if isinstance(tiles, TilesByExpert) else LocalTokens.HALF

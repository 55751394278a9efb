"""One result from the results of all ranks."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from benchmarks.gpu.record import Recorder

ORDER = "order"
"""Field with what a rank has launched, in its order."""
SETTING = "setting"
"""Name of a rank's first result, when it is connected to the others."""
_KEY = ("name", "variant", "round", "mb", "max_ctas", "what")


class OtherOrderError(RuntimeError):
    """Ranks launched collectives in different orders."""


class Merger:
    """Adds a result to the part's file when it has come from all ranks, and errors at once.

    A number that differs is the largest, and there is a list of it by rank.

    Attributes:
        results: those that came from all ranks.
        ended: names of the results that came from all ranks, or were an error on one.
        last_error: name of the last result that was an error; None if there was none.
        failed_ranks: those that have saved an error.
    """

    def __init__(self, record: Recorder, num_ranks: int) -> None:
        self.results: list[dict[str, Any]] = []
        self.ended: set[str] = set()
        self.last_error: str | None = None
        self.failed_ranks: set[int] = set()
        self._record = record
        self._num_ranks = num_ranks
        self._waiting: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}

    def take(self, rank: int, result: dict[str, Any]) -> None:
        """Takes a result of a rank."""
        if "error" in result:
            self._add_error(rank, result)
            return
        key = tuple(result.get(field) for field in _KEY)
        by_rank = self._waiting.setdefault(key, {})
        by_rank[rank] = result
        if len(by_rank) == self._num_ranks:
            del self._waiting[key]
            with self._record.guarded(result["name"]):
                whole = merged([by_rank[rank] for rank in range(self._num_ranks)])
                self._record.add(**whole)
                self.results.append(whole)
            self.ended.add(result["name"])

    def _add_error(self, rank: int, result: dict[str, Any]) -> None:
        self._record.num_errors += 1
        self._record.add(**result, rank=rank)
        self.failed_ranks.add(rank)
        self.last_error = result["name"]
        self.ended.add(result["name"])

    def end_without_result(self, rank: int, name: str, status: int, log: str) -> None:
        """Adds the error of a rank that ended without saving one.

        Args:
            name: of what it did.
            log: what it printed.
        """
        self._add_error(rank, {"name": name, "error": f"the rank ended with status {status}", "frames": log})

    def close(self) -> None:
        """Adds what came from some ranks only."""
        for by_rank in self._waiting.values():
            for rank, result in by_rank.items():
                self._record.add(**{name: value for name, value in result.items() if name != ORDER}, rank=rank)
        self._waiting = {}


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result from the results of all ranks, which have the same fields.

    Raises:
        OtherOrderError: they launched collectives in different orders.
    """
    found: dict[str, Any] = {}
    for field in results[0]:
        values = [result[field] for result in results]
        if field == ORDER:
            check_order(values)
            found["launches"] = len(values[0])
        elif all(value == values[0] for value in values):
            found[field] = values[0]
        elif all(isinstance(value, float) for value in values):
            found |= {field: max(values), f"{field}_of_ranks": values}
        else:
            found[field] = values
    return found


def check_order(orders: Sequence[Sequence[str]]) -> None:
    """
    Raises:
        OtherOrderError: a rank has another order than rank 0.
    """
    for rank, order in enumerate(orders):
        for place, (first, other) in enumerate(zip_longest(orders[0], order)):
            if first != other:
                raise OtherOrderError(f"launch {place} is {first} on rank 0 and {other} on rank {rank}")

"""Identifies the rank that caused a failed collective."""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_lancet.errors import PeerError
from megatron_lancet.schedule.ops import Op
from megatron_lancet.schedule.ranges import name_ranks

_REGISTRATION_S = 2.0
"""Time for the other ranks to notice the failure too. They lose their connections at the same moment."""
_POLL_S = 0.05


class Peers:
    """The ranks that a transport connects.

    A failed collective does not say which rank caused it: with one rank gone, the messages between the others fail as
    well. So every rank that gives up registers in the store; a rank that has not registered after a while is gone or
    stuck. This costs nothing before something fails. Where all connected ranks have given up, it was one that is
    connected to them and not to this rank.

    Attributes:
        others: global ranks that are connected, without this rank.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        own_rank: int,
        store: dist.Store,
        timeout: timedelta,
        connected_by_others: Sequence[int] = (),
    ) -> None:
        """
        Args:
            ranks: global ranks that are connected.
            own_rank: this rank, also global.
            store: store that all of them share.
            timeout: time after which the transport gives up on a message.
            connected_by_others: ranks for which the connected ones may wait, for example on their own node.
        """
        self._own_rank = own_rank
        self.others = [rank for rank in ranks if rank != own_rank]
        self._further = [rank for rank in connected_by_others if rank != own_rank and rank not in self.others]
        self._store = store
        self._timeout = timeout

    def failure(self, op: Op, waited_s: float, cause: BaseException, micro_batch: int | None = None) -> PeerError:
        """Returns the error to raise when ``op`` has failed; asking the other ranks takes up to three seconds.

        Args:
            waited_s: time since ``op`` was launched.
            micro_batch: its number in the step, from 1; None where it is not known.
        """
        timeout_s = self._timeout.total_seconds()
        timed_out = waited_s >= timeout_s or "timed out" in str(cause).lower()  # gloo: also of a message behind it
        what = f"sent nothing for {timeout_s:g} s" if timed_out else "closed the connection"
        lost = self._lost()
        who = f"{name_ranks(self.others)} failed as well"
        if lost:
            who = f"{'one or more of ' if len(lost) > 1 else ''}{name_ranks(lost)} {what}"
        whose = "" if micro_batch is None else f" of micro-batch {micro_batch}"
        reported, _, _ = (str(cause) or repr(cause)).splitlines()[0].partition(". ")
        return PeerError(
            f"rank {self._own_rank} gave up on {op} ({op.description()}){whose}: {who}. The output of that rank, or "
            f"its system log, gives the reason. Reported by the transport: {reported}"
        )

    def _lost(self) -> list[int]:
        """Returns the global ranks that have not registered: of those that are connected, else of the others."""
        if len(self.others) == 1 and not self._further:
            return self.others
        present: set[int] = set()
        # Calls to a store whose host is stuck don't return, so a thread makes them.
        caller = threading.Thread(target=self._register_and_poll, args=(present,), daemon=True)
        caller.start()
        caller.join(_REGISTRATION_S + 1.0)
        lost = [rank for rank in self.others if rank not in present]
        return lost or [rank for rank in self._further if rank not in present]

    def _register_and_poll(self, present: set[int]) -> None:
        """Adds every other rank that registers to ``present``."""
        deadline_s = time.monotonic() + _REGISTRATION_S
        everyone = [*self.others, *self._further]
        try:
            self._store.set(_key(self._own_rank), "")
            while len(present) < len(everyone) and time.monotonic() < deadline_s:
                present.update(rank for rank in everyone if self._store.check([_key(rank)]))
                time.sleep(_POLL_S)
        except RuntimeError:
            # The store is gone with its host, so the failed rank is unknown.
            present.clear()


def _key(rank: int) -> str:
    return f"megatron-lancet/gave-up/{rank}"

"""Graceful SIGTERM: finish the step, save a checkpoint, exit.

SLURM sends SIGTERM before a time limit, and torchrun passes it on.
"""

import argparse
import threading

import torch
import torch.distributed as dist

from megatron_lancet.config import LancetConfig, PlanChoice
from megatron_lancet.schedule.ranges import name_ranks
from megatron_lancet.training.process import console
from megatron_lancet.training.process.exit import RankStatus, say

_PATIENCE_S = 20.0
"""A rank whose step does not end prints its status after this time; torchrun kills after 30 s by default."""


def saves_on_sigterm(args: argparse.Namespace, config: LancetConfig) -> bool:
    """Decide whether SIGTERM saves and ends the run, and pass that to Megatron, whose data loaders' workers then ignore
    it.

    SIGTERM does so with ``--save``, unless the user has asked for stock (``--lancet-plan off``) or for one of
    Megatron's handlers. With ``--async-save`` it ends the run at once, as in stock: the process that writes for
    Megatron ends at the same signal, and the rank would wait for it.

    To be called after :func:`~megatron.training.global_vars.set_global_variables`, which would install Megatron's
    handler.
    """
    if args.exit_signal_handler or args.exit_signal_handler_for_training:
        return False
    wanted = bool(args.save) and config.plan is not PlanChoice.OFF
    if wanted and args.async_save:
        console.say(
            "Megatron-Lancet: SIGTERM will end this run without a checkpoint, because --async-save's process ends at "
            "the same signal. To finish the step and save at SIGTERM, drop --async-save."
        )
    args.exit_signal_handler = wanted and not args.async_save
    return bool(args.exit_signal_handler)


class StopRequest:
    """Holds a SIGTERM back until the end of the step. All ranks then stop together, even if only one was signalled.

    Before the training loop begins, SIGTERM ends the process at once: there is nothing to save. Further SIGTERMs during
    the loop change nothing: SLURM signals every process of a step, and a signalled torchrun signals its ranks again.
    ``status`` receives the function that is called at SIGTERM.
    """

    def __init__(self, status: RankStatus, device: torch.device) -> None:
        self._status = status
        self._device = device
        self._asked = False

    def begin(self) -> None:
        """Hold each SIGTERM back from now on until the end of the step."""
        self._status.on_sigterm = self._ask

    def signals_received(self) -> list[bool]:
        """Returns by rank whether it was asked to stop. Collective over all ranks, after each step."""
        asked = torch.tensor([self._asked], dtype=torch.int32, device=self._device)
        flags = [torch.empty_like(asked) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, asked)
        received: list[bool] = torch.cat(flags).bool().tolist()
        if any(received):
            ranks = [rank for rank, one in enumerate(received) if one]
            console.say(f"Megatron-Lancet: {name_ranks(ranks)} received SIGTERM: saving a checkpoint, then exiting.")
        return received

    def _ask(self) -> None:
        """Called by the thread that watches for signals."""
        if self._asked:
            return
        self._asked = True
        timer = threading.Timer(
            _PATIENCE_S,
            lambda: say(f"SIGTERM was received {_PATIENCE_S:g} s ago, and the run continues: {self._status}"),
        )
        timer.daemon = True
        timer.start()

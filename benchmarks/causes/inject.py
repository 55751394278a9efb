"""Makes a rank slow, its host late, the link slow, or the routing skewed, in single steps."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_lancet.lab.causes.replay import Cause

_PERIOD_S = 0.004
_BUSY_LOOP = f"""
import sys, time
share, period_s = float(sys.argv[1]), {_PERIOD_S}
while True:
    until_s = time.process_time() + share * period_s
    while time.process_time() < until_s:
        pass
    time.sleep((1 - share) * period_s)
"""
SLOW_RANK, LATE_RANK = 1, 0

Biases = list[torch.Tensor]
"""Of the routers of a model, by layer."""


def biases_of(model: GPTModel) -> Biases:
    """Copies of the routers' expert biases."""
    return [layer.mlp.router.expert_bias.clone() for layer in model.decoder.layers]


def set_biases(model: GPTModel, biases: Biases) -> None:
    """Sets the routers' expert biases."""
    for layer, bias in zip(model.decoder.layers, biases, strict=True):
        layer.mlp.router.expert_bias.copy_(bias)


class Injection:
    """One cause of one size, which can be switched on and off between steps."""

    def __init__(
        self,
        cause: Cause,
        size: float,
        model: GPTModel,
        biases: Mapping[float | None, Biases],
        set_rate: Callable[[float], None],
        rate_bps: float,
    ) -> None:
        """
        Args:
            size: see ``benchmarks/causes/cases.py``.
            biases: of even routing at None, and by share of the first expert.
            set_rate: sets the rate of the shaped link; collective.
            rate_bps: the rate without an injection.
        """
        self._cause, self._size, self._model = cause, size, model
        self._biases, self._set_rate, self._rate_bps = biases, set_rate, rate_bps
        self._loop: subprocess.Popen[bytes] | None = None

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, the cause can be switched on; at the end it is off."""
        hooks: list[Any] = []
        if self._cause is Cause.PACE and dist.get_rank() == SLOW_RANK:
            self._loop = subprocess.Popen([sys.executable, "-c", _BUSY_LOOP, str(self._size)])
        try:
            self.switch(False)
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.switch(False)
            if self._loop is not None:
                self._loop.kill()
                self._loop.wait()

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """The step inside runs with the cause. Collective."""
        self.switch(True)
        try:
            with self._sleeping():
                yield
        finally:
            self.switch(False)

    def switch(self, is_on: bool) -> None:
        """Switches what lasts. Collective."""
        match self._cause:
            case Cause.ROWS:
                set_biases(self._model, self._biases[self._size if is_on else None])
            case Cause.WIRE:
                self._set_rate(self._rate_bps / (self._size if is_on else 1.0))
            case Cause.PACE if self._loop is not None:
                os.kill(self._loop.pid, signal.SIGCONT if is_on else signal.SIGSTOP)

    @contextmanager
    def _sleeping(self) -> Iterator[None]:
        hooks = []
        if self._cause is Cause.HOST and dist.get_rank() == LATE_RANK:
            hooks = [layer.mlp.router.register_forward_pre_hook(self._sleep) for layer in self._model.decoder.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _sleep(self, *_: Any) -> None:
        time.sleep(self._size / 1e3)

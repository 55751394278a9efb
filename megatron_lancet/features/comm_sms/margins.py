"""Kernels of compute that leave multiprocessors (SMs) to concurrent messages.

A matrix product takes all SMs by default. Beside a message some of them are taken, and the blocks that found none run
in a second wave: the product takes twice as long. A product that is already running keeps its SMs to its end, and a
message waits for it. So the products leave as many SMs as the messages may take.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

TE_VARIABLES = ("NVTE_EXT_MARGIN_SM", "NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")
"""Environment variables of Transformer Engine: SMs that its matrix products leave, and its norms, forward and backward.

It reads the first one at each product, the others when a module is built.
"""
NCCL_MOST = "NCCL_MAX_CTAS"
_SETTER = "_set_sm_carveout_experimental"


def has_carveout() -> bool:
    """Whether this torch lets its matrix products leave SMs."""
    return hasattr(torch._C, _SETTER)


def given_elsewhere() -> str | None:
    """A variable of the environment that sets SMs of messages or of compute; None without any."""
    return next((name for name in (NCCL_MOST, *TE_VARIABLES) if os.environ.get(name)), None)


@contextmanager
def free_sms(num_sms: int) -> Iterator[None]:
    """Inside, matrix products and norms leave ``num_sms`` SMs."""
    before = {name: os.environ.get(name) for name in TE_VARIABLES}
    carveout = torch._C._get_sm_carveout_experimental()
    os.environ.update(dict.fromkeys(TE_VARIABLES, str(num_sms)))
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

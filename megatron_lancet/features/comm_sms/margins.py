"""Kernels of compute that leave multiprocessors (SMs) to concurrent messages.

A matrix product takes all SMs by default. Beside a message some of them are taken, and the blocks that found none run
in a second wave: the product takes twice as long. A product that is already running keeps its SMs to its end, and a
message waits for it. So the products leave as many SMs as the messages may take.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

_OF_PRODUCTS = "NVTE_EXT_MARGIN_SM"
"""Environment variable of Transformer Engine: SMs that its matrix products leave. It is read at each product."""
_OF_NORMS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")
"""The same of its norms, forward and backward. They are read when a module is built."""
TE_VARIABLES = (_OF_PRODUCTS, *_OF_NORMS)
NCCL_MOST = "NCCL_MAX_CTAS"
_SETTER = "_set_sm_carveout_experimental"


def has_carveout() -> bool:
    """Whether this torch lets its matrix products leave SMs."""
    return hasattr(torch._C, _SETTER)


def given_elsewhere() -> str | None:
    """A variable of the environment that sets SMs of messages or of compute; None without any."""
    return next((name for name in (NCCL_MOST, *TE_VARIABLES) if os.environ.get(name)), None)


@contextmanager
def products_leave(num_sms: int) -> Iterator[None]:
    """Inside, matrix products of torch and Transformer Engine leave ``num_sms`` SMs."""
    carveout = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        with _set({_OF_PRODUCTS: str(num_sms)}):
            yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)


def norms_leave(num_sms: int) -> AbstractContextManager[None]:
    """Norms of modules that are built inside leave ``num_sms`` SMs."""
    return _set(dict.fromkeys(_OF_NORMS, str(num_sms)))


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Compute kernels that leave multiprocessors (SMs) free for concurrent messages.

A matrix product uses all SMs by default. If a message holds some of them, the product's last blocks run later: products
took 1.2 to 1.4 times as long on an H200. If the product starts first, the message waits for the product's end. So with
the flag products leave as many SMs free as messages may take.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

_OF_PRODUCTS = "NVTE_EXT_MARGIN_SM"
"""Environment variable of Transformer Engine: SMs that its matrix products leave free. Read at each product."""
_OF_NORMS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")
"""The same for its norms, forward and backward. Read when a module is built."""
TE_VARIABLES = (_OF_PRODUCTS, *_OF_NORMS)
NCCL_MOST = "NCCL_MAX_CTAS"
NCCL_LEAST = ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS")
"""Variables that ask NCCL for a least number of SMs. The last two go before a communicator's bound that is lower."""
_SETTER = "_set_sm_carveout_experimental"


def has_carveout() -> bool:
    """Whether torch's matrix products can leave SMs free."""
    return hasattr(torch._C, _SETTER)


def given_elsewhere(num_sms: int) -> str | None:
    """The first environment variable that asks for something else than messages of ``num_sms`` SMs, with its value.

    A least number that is not above ``num_sms`` goes with it: NCCL keeps both.
    """
    names = [name for name in (NCCL_MOST, *TE_VARIABLES) if os.environ.get(name)]
    names += [name for name in NCCL_LEAST if asks_for_more(name, num_sms)]
    return f"{names[0]} is {os.environ[names[0]]}" if names else None


def asks_for_more(name: str, num_sms: int) -> bool:
    """Whether the environment variable with a least number of SMs asks for more than ``num_sms``."""
    least = os.environ.get(name, "")
    return least.isdigit() and int(least) > num_sms


@contextmanager
def products_leave(num_sms: int) -> Iterator[None]:
    """Inside, matrix products of torch and Transformer Engine leave ``num_sms`` SMs free.

    A product that is not grouped does so in cuBLASLt only, and torch prefers cuBLAS.
    """
    carveout, library = torch._C._get_sm_carveout_experimental(), torch.backends.cuda.preferred_blas_library()
    torch._C._set_sm_carveout_experimental(num_sms)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        with _set({_OF_PRODUCTS: str(num_sms)}):
            yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        torch.backends.cuda.preferred_blas_library(library)


def norms_leave(num_sms: int) -> AbstractContextManager[None]:
    """Norms of modules that are built inside leave ``num_sms`` SMs free."""
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

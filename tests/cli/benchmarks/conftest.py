"""What the tests of benchmarks on a shaped network need."""

import pytest

from benchmarks.harness.namespaces import Namespaces, check_host, this_host
from megatron_lancet.errors import UsageError


def why_not() -> str | None:
    """Why this machine can't make the network, None where it can."""
    try:
        check_host(*this_host())
        with Namespaces():
            return None
    except UsageError as error:
        return str(error)


@pytest.fixture
def shaped_network():
    """Skips where two network namespaces with a shaped link between them can't be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)

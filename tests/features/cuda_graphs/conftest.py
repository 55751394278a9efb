import os
from unittest import mock

import pytest

from megatron_lancet.training.platform.cpu import cpu_platform


@pytest.fixture(scope="module")
def megatron_on_cpu():
    with mock.patch.dict(os.environ), cpu_platform():
        yield

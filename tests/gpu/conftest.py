import os
from unittest import mock

import pytest

from tests.gpu.devices import chosen


@pytest.fixture
def device(request):
    """The device of a test; at the test's end no order was found missing on it."""
    with mock.patch.dict(os.environ), chosen(request.param) as device:
        yield device
        assert device.problems() == []

"""The end of a run: its closing report."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lancet.training.run import OverlappedRun


def ended(stages: tuple[object, ...]) -> Any:
    """A run of which only the parts exist that Megatron has made before the model."""
    run: Any = OverlappedRun.__new__(OverlappedRun)
    run.setup, run.steering = SimpleNamespace(stages=stages), SimpleNamespace(writes_only=False)
    return run


def test_run_that_ends_before_its_model_has_no_report():
    """Megatron's own message is the last one, and no error of the report hides it."""
    ended(()).report()
    with pytest.raises(AttributeError, match="config"):  # a report needs the whole run
        ended((object(),)).report()

"""What Megatron's own script with ``--spec`` refuses before a plan is chosen."""

import pytest

from megatron_lancet.config import OWN_SPEC
from megatron_lancet.errors import UsageError
from megatron_lancet.training import spec
from tests.unit.training.validated import parsed


@pytest.mark.parametrize(
    "flag", ["--lancet-separate-expert-grads", "--lancet-mock-link 20:25", "--lancet-mock-node-link 20:25"]
)
def test_flag_that_only_our_script_follows_is_refused(monkeypatch, flag):
    monkeypatch.setenv(spec.FLAGS_VARIABLE, flag)
    with pytest.raises(UsageError, match=f"^LANCET_FLAGS: {flag.split()[0]} does not work with --spec: other scripts"):
        spec._config_from_environment()


def test_restarts_inside_the_process_are_refused(monkeypatch):
    monkeypatch.delenv(spec.FLAGS_VARIABLE, raising=False)
    args = parsed(monkeypatch, "--spec", *OWN_SPEC, "--inprocess-restart")
    monkeypatch.setattr(spec, "get_args", lambda: args)
    with pytest.raises(UsageError, match="--inprocess-restart would prepare a second model"):
        spec._SpecHook()

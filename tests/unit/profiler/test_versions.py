"""Versions in a profile's key."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

from megatron_lancet import __version__
from megatron_lancet.profiler import facts


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch):
    """Of this project nothing is asked of the installed packages: a copy of the checkout may run without being one."""

    def version(package):
        if package == "megatron-lancet":
            raise PackageNotFoundError(package)
        return "1.2"

    monkeypatch.setattr(facts, "version", version)
    found = facts.package_versions(SimpleNamespace(stages=()))
    assert found == {"torch": "1.2", "megatron-core": "1.2", "megatron-lancet": __version__}

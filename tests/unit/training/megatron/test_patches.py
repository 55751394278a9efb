"""The assumptions on Megatron and torch hold, and a violated one is a message."""

import importlib.metadata

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import replaced, wrapped
from megatron_lancet.training.megatron import patches, versions


def test_this_megatron_is_known():
    versions.check_versions()
    patches.check_seams()


def test_a_lost_parameter_is_named():
    def gating(self, hidden):
        raise NotImplementedError

    with (
        replaced(TopKRouter, "gating", gating),
        pytest.raises(UsageError, match=r"TopKRouter\.gating\(input\)"),
    ):
        patches.check_seams()


@pytest.mark.parametrize(
    ("package", "installed", "known"),
    [
        ("megatron-core", "0.18.1", False),
        ("megatron-core", "0.20.0", False),
        ("megatron-core", "0.19.5", True),
        ("torch", "2.10.0", False),
        ("torch", "2.11.0+cu128", True),
    ],
)
def test_versions(monkeypatch, package, installed, known):
    true_version = importlib.metadata.version
    monkeypatch.setattr(versions, "version", lambda name: installed if name == package else true_version(name))
    if known:
        versions.check_versions()
    else:
        with pytest.raises(UsageError, match=rf"expected {package}.*found {package} {installed}"):
            versions.check_versions()


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(UsageError, match="megatron-core is not installed"):
        versions.check_versions()


def test_replacing_what_is_not_there_fails():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"), replaced(torch, "no_such_name", 1):
        pass


def test_wrapping_a_class_attribute_restores_it_untouched():
    class Base:
        def method(self):
            return 1

    class Derived(Base):
        pass

    with wrapped(Derived, "method", lambda stock: lambda self: stock(self) + 1):
        assert Derived().method() == 2
        assert Base().method() == 1
    assert "method" not in vars(Derived)
    assert Derived().method() == 1

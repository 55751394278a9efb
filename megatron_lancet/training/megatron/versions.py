"""Supported versions of torch and Megatron, checked before either is imported."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from megatron_lancet.errors import UsageError

REQUIRED = {"megatron-core": SpecifierSet(">=0.19,<0.20"), "torch": SpecifierSet(">=2.11")}


def check_versions(required: dict[str, SpecifierSet] = REQUIRED) -> None:
    """Raise a UsageError if a package is missing, or its version is not supported."""
    for package, supported in required.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise UsageError(
                f"{package} is not installed; expected {package}{supported}. Run: pip install '{package}{supported}'"
            ) from None
        # Local builds such as 2.11.0+cu128 and pre-releases of a supported version count as that version.
        if not supported.contains(installed, prereleases=True):
            raise UsageError(
                f"expected {package}{supported}, found {package} {installed}, whose internals may differ. "
                f"Run: pip install '{package}{supported}'"
            )

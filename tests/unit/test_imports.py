"""Imports point one way, and each foreign package is touched where the design says."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_lancet"
# What each part may import of its own project, next to itself. Everybody may import these:
LEAVES = {"errors", "files", "patching", "units", "__version__"}
ALLOWED = {
    "files": set(),
    "checkpoint": set(),
    "units": set(),
    "schedule": {"registry"},
    "planning": {"schedule", "registry"},
    "config": {"schedule", "flags", "feature"},
    "feature": {"feature_parts", "flags", "config", "schedule", "planning"},  # the last three for annotations only
    "feature_parts": set(),
    "registry": {"feature", "model", "runtime", "schedule"},  # for annotations only
    "flags": set(),
    "errors": set(),
    "patching": set(),
    "data": set(),
    "cli": {"schedule", "planning", "data"},
    "__main__": {"cli"},
    "dry_run_flags": {"flags"},
    "plan_words": {"schedule"},
    "runtime": {"schedule", "registry"},
    "model": {"schedule", "runtime", "registry"},
    "profiler": {"schedule", "planning", "runtime", "model"},
    "report": {"schedule", "planning", "runtime"},
    "training": {
        "dry_run_flags",
        "plan_words",
        "schedule",
        "planning",
        "runtime",
        "model",
        "profiler",
        "report",
        "config",
        "feature",
        "feature_parts",
        "flags",
        "data",
        "registry",
    },
    "inference": {"schedule", "planning", "runtime", "model", "config", "cli", "data", "training", "checkpoint"},
    "testkit": {"registry", "schedule", "planning", "runtime", "report", "config", "feature", "flags", "training"},
    "module_types": set(),
    "library": {"module_types", "config", "feature", "model", "registry", "training"},
    "lab": {
        "dry_run_flags",
        "schedule",
        "planning",
        "runtime",
        "model",
        "report",
        "config",
        "feature",
        "feature_parts",
        "flags",
        "cli",
        "data",
        "training",
        "testkit",
        "registry",
    },
}
ALLOWED["features"] = {*ALLOWED["training"], "training", "checkpoint", "module_types"} - {"registry"}
FEATURES = "features"
"""No part imports these: ``registry.py`` names them, and a feature imports its own folder only."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it."""
    return imports_in(ast.parse(path.read_text()))


def imports_in(tree: ast.AST) -> set[str]:
    """Dotted names that a tree imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_of_packages_point_one_way(path):
    part = part_of(path)
    if part == "__init__":
        # To drop a warning of torch's before anything imports torch, and to find a public name when it is asked for.
        assert imports_of(path) == {"importlib", "logging"}
        return
    used = {name.split(".")[1] for name in imports_of(path) if name.startswith("megatron_lancet.")}
    assert used <= {part} | ALLOWED[part] | LEAVES


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_imports_are_in_allowed_packages_only(path):
    part, names = part_of(path), imports_of(path)
    roots = {name.split(".")[0] for name in names}
    is_for_planner = part == FEATURES and path.name in ("order.py", "costs.py", "support.py")
    if part in ("files", "schedule", "planning", "config", "flags", "cli") or is_for_planner:
        assert roots.isdisjoint({"torch", "megatron", "numpy"})
    if part in ("runtime", "report"):
        assert "megatron" not in roots
    if part not in ("training", "lab", "features"):
        assert not any(name.startswith("megatron.training") for name in names)
    # Once it is imported, torch calls Python at each allocation and event of a device, and a recompute fails there.
    assert not any(name.startswith("torch.cuda._sanitizer") for name in names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_features_are_named_by_the_registry_only(path):
    """Nothing imports a feature, and features do not import each other: each can be deleted with its line."""
    parts = path.relative_to(PACKAGE).parts
    own = f"megatron_lancet.features.{parts[1]}" if parts[0] == "features" and len(parts) > 2 else None
    imported = [name for name in imports_of(path) if name.startswith("megatron_lancet.features.")]
    assert [name for name in imported if own is None or not f"{name}.".startswith(f"{own}.")] == []


def files_read_with(start: Path) -> set[Path]:
    """The files of the package that a file imports, directly or not, but for annotations only; itself included."""
    read, waiting = set(), [start]
    while waiting:
        path = waiting.pop()
        if path in read:
            continue
        read.add(path)
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        for name in imports_in(tree):
            for prefix in (name, name.rpartition(".")[0]):
                module = PACKAGE.parent / (prefix.replace(".", "/") + ".py")
                if prefix.startswith("megatron_lancet.") and module.exists():
                    waiting.append(module)
                    break
    return read


def test_the_model_is_read_without_its_optional_parts():
    """A change of the core needs these lines in mind: 10,162 when tiles, documents and pairs were among them."""
    read = files_read_with(PACKAGE / "model/gpt.py")
    assert not [path for path in read if part_of(path) == FEATURES]
    assert sum(bool(line.strip()) for path in read for line in path.read_text().splitlines()) <= 6_500


def test_import_rules_cover_every_package():
    assert {part_of(path) for path in modules()} - {"__init__"} == set(ALLOWED)

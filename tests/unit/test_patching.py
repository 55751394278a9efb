"""Attributes of foreign modules and classes are replaced for the length of a context, in one folder alone."""

import ast
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch
from megatron.training import checkpointing

from megatron_lancet.features.checkpoints import seams as seams_of_checkpoints
from megatron_lancet.patching import around, replaced
from megatron_lancet.training.megatron.seams import SEAMS

PACKAGE = Path(__file__).parents[2] / "megatron_lancet"
OWNERS = {
    "features/bins": ("megatron.training.training",),
    "cli": ("argparse", "sys"),  # the refusals of all tools are one line; their command line
    "features/checkpoints": (
        "megatron.core.dist_checkpointing",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.training",
    ),
    "features/comm_priority": ("megatron.core.distributed", "torch.distributed"),  # DDP's reductions
    "features/comm_sms": ("megatron.core.parallel_state",),
    "features/cuda_graphs": ("megatron.core.tensor_parallel.random",),
    "features/hugging_face": ("megatron.core.transformer.module.Float16Module", "megatron.training.training"),
    "features/mtp": ("megatron.core.transformer.multi_token_prediction",),
    "features/pairing": ("megatron.core.pipeline_parallel.schedules", "megatron_lancet.features.pairing.lane"),
    "lab/check": ("sys",),  # the same
    "lab/launch": ("sys",),  # the command line that Megatron's parser reads
    "lab/modelled_step": ("torch", "megatron_lancet.model", "megatron_lancet.runtime"),  # kernels of a GPU
    "library": ("megatron.bridge.training.pretrain",),  # its loop has no callback for every end
    "testkit/mock": ("torch.distributed",),  # it is a world of torch.distributed's, for whoever asks for one
    "testkit/virtual_gpu": ("torch", "megatron_lancet.runtime", "megatron_lancet.testkit.mock"),  # a GPU, likewise
    "training/megatron": ("megatron", "torch"),
    "training/platform": ("torch",),  # stand-ins for torch.cuda
}
"""Whose attributes the files of a folder may replace."""
_PATCHES = ("bins/loaders.py", "checkpoints/patches.py", "comm_sms/groups.py")
REPLACING = {"around", "replaced", "setattr", "delattr"}


class Stock:
    def method(self, x, *, factor=1):
        """Doc."""
        return self, x * factor

    @staticmethod
    def static(x):
        return x


class Derived(Stock):
    pass


def test_replacing_a_missing_attribute_fails():
    for patch in (replaced(torch, "no_such_name", 1), around(torch, "no_such_name", lambda stock: stock())):
        with pytest.raises(AttributeError, match="torch has no attribute 'no_such_name' to replace"), patch:
            pass


def test_around_method_of_parent_restores_class_untouched():
    def doubled(stock, self, x, **kwargs):
        return stock(self, 2 * x, **kwargs)

    one = Derived()
    with around(Derived, "method", doubled):
        assert one.method(3, factor=5) == (one, 30)
        assert Stock().method(3)[1] == 3
        assert Derived.method.__doc__ == "Doc."
        assert list(inspect.signature(Derived.method).parameters) == ["self", "x", "factor"]
    assert "method" not in vars(Derived)
    assert one.method(3) == (one, 3)


def test_around_a_static_method_stays_static():
    before = vars(Stock)["static"]
    with around(Stock, "static", lambda stock, x: stock(x) + 1):
        assert (Stock.static(1), Stock().static(1)) == (2, 2)
    assert vars(Stock)["static"] is before


def test_around_a_function_that_getattr_finds_is_undone():
    class Proxy:
        def __getattr__(self, name):
            return lambda x: f"{name} {x}"

    proxy = Proxy()
    with around(proxy, "open", lambda stock, x: stock(x).upper()):
        assert proxy.open("file") == "OPEN FILE"
    assert vars(proxy) == {}


def test_around_the_same_function_twice_runs_the_later_one_first():
    with (
        around(Stock, "static", lambda stock, x: [*stock(x), "inner"]),
        around(Stock, "static", lambda stock, x: [*stock(x), "outer"]),
    ):
        assert Stock.static(["stock"]) == ["stock", "inner", "outer"]


def test_around_restores_after_an_error():
    before = Stock.method
    with pytest.raises(KeyError), around(Stock, "method", lambda stock, *_: None):
        raise KeyError
    assert Stock.method is before


def foreign_names(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports stand for, dotted."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted name of an expression; None if it does not begin with an imported name."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


def all_names(tree: ast.AST) -> dict[str, str]:
    """Also names that a file gives to what it imports: optimizer = distrib_optimizer.DistributedOptimizer."""
    names = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = dotted(node.value, names)
            if value is not None:
                names.setdefault(node.targets[0].id, value)
    return names


def replaced_owners(source: str) -> list[str]:
    """Whose attributes a file replaces: dotted names, "?" where it calls our helpers with something else."""
    tree = ast.parse(source)
    names = all_names(tree)
    owners = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (function := called(node)) in REPLACING:
            owner = dotted(node.args[0], names)
            if owner or function in ("around", "replaced"):
                owners.append(owner or "?")
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else node.targets
            owners += [
                owner
                for target in targets
                if isinstance(target, ast.Attribute) and (owner := dotted(target.value, names))
            ]
    return owners


def called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def may_replace(path: Path, owner: str) -> bool:
    folder = path.parent.relative_to(PACKAGE).as_posix()
    if not any(owner == mine or owner.startswith(f"{mine}.") for mine in OWNERS.get(folder, ())):
        return False
    return folder != "training/platform" or not owner.startswith("torch.distributed")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_foreign_attributes_are_replaced_in_one_folder(path):
    if path.name != "patching.py":
        owners = replaced_owners(path.read_text())
        assert [owner for owner in owners if not may_replace(path, owner)] == []


def changed_functions(source: str) -> list[tuple[str, str]]:
    """Owner and name of each function of Megatron's that a file puts something around."""
    tree = ast.parse(source)
    names = all_names(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "around"]
    found = [(dotted(node.args[0], names), node.args[1].value) for node in calls]
    return [(owner, name) for owner, name in found if owner.startswith("megatron.")]


@pytest.mark.parametrize(
    "path",
    [
        *sorted((PACKAGE / "training/megatron").glob("*.py")),
        *(PACKAGE / "features" / name for name in _PATCHES),
    ],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_changed_functions_are_checked_seams(path):
    known = (*SEAMS, *seams_of_checkpoints.SEAMS) if path.parent.name == "checkpoints" else SEAMS
    seams = {(owner, name) for owner, name, _ in known} | {(checkpointing.maybe_msc, "open")}  # checked by its source
    unchecked = {(pkgutil.resolve_name(owner), name) for owner, name in changed_functions(path.read_text())} - seams
    assert unchecked == set()


def test_changed_functions_are_found():
    files = "training/megatron/patches.py", "features/checkpoints/patches.py"
    found = [one for file in files for one in changed_functions((PACKAGE / file).read_text())]
    assert ("megatron.training.training", "train_step") in found
    assert ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", "state_dict") in found


def test_every_folder_that_may_replace_does():
    owners = {
        folder: [owner for path in (PACKAGE / folder).glob("*.py") for owner in replaced_owners(path.read_text())]
        for folder in OWNERS
    }
    assert all(owners.values())
    assert any(owner.startswith("megatron.") for owner in owners["training/megatron"])


@pytest.mark.parametrize(
    ("line", "owner"),
    [
        ("around(training, 'train_step', call)", "megatron.training.training"),
        ("patching.replaced(training.utils, 'name', 1)", "megatron.training.training.utils"),
        ("stack.enter_context(replaced(dist, 'new_group', 1))", "torch.distributed"),
        ("setattr(training, 'train', train)", "megatron.training.training"),
        ("training.train = train", "megatron.training.training"),
        ("del torch.cuda.Stream", "torch.cuda"),
        ("owner = training.Loop; owner.size: int = 3", "megatron.training.training.Loop"),
        ("around(anything(), 'name', call)", "?"),
    ],
)
def test_each_way_to_replace_an_attribute_is_found(line, owner):
    imports = "import torch\nimport torch.distributed as dist\nfrom megatron.training import training\n"
    assert replaced_owners(imports + line) == [owner]
    for folder in (PACKAGE / "model", PACKAGE / "lab/dry_run"):
        assert not may_replace(folder / "file.py", owner)


def test_attributes_of_own_objects_may_be_set():
    assert replaced_owners("import torch\nself.x = 1\nargs.name = torch.ones(1)\nsetattr(args, 'name', 2)") == []

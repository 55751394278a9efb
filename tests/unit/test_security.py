"""Nothing of ours runs what it reads: what the source may not contain, checked on its syntax tree."""

import ast
import functools
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("megatron_lancet", "tools", "benchmarks", "docs")

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
YAML_LOADERS = {"load", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}
NUMPY_READERS = {"load"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}

PROCESSES = {
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")),
    *("Popen", "os.posix_spawn", "os.posix_spawnp"),
}
STARTS = {
    "megatron_lancet/lab/launch/isolated/script.py": "a launch script, isolated or by --trust-script",
    "megatron_lancet/lab/launch/isolated/sandbox.py": "the same script, as its sandbox",
    "megatron_lancet/lab/launch/isolated/launchers.py": "the command of a launcher in the same script",
    "benchmarks/demo/training_log/training_process.py": "our own training",
    "docs/megatron_versions.py": "itself, with another Megatron",
    "tools/check_gpu.py": "pip, git and our own benchmarks",
    **dict.fromkeys(
        (
            *("benchmarks/harness/origin.py", "benchmarks/harness/namespaces.py", "benchmarks/harness/ranks.py"),
            "benchmarks/harness/machine_speed.py",
            *("benchmarks/gpu/check/driver.py", "benchmarks/gpu/check/part/machine.py"),
            "benchmarks/gpu/check/part/memcheck.py",
            "benchmarks/demo/links/link.py",
            *("benchmarks/demo/data.py", "benchmarks/demo/job.py", "benchmarks/causes/inject.py"),
            *("benchmarks/from_trace/tracelens_figures.py", "benchmarks/from_trace/hta_overlap.py"),
        ),
        "our own benchmarks, git, ip, nvidia-smi and compute-sanitizer",
    ),
}
"""Files that start processes, and what they start: only the first three run a file they read."""

UNPICKLER = "import pickle\nclass Own(pickle.Unpickler):\n    def find_class(self, module, name):\n        {}"


def sources() -> list[Path]:
    found = [REPOSITORY / "pretrain_gpt_moe.py", REPOSITORY / "setup.py"]
    for folder in FOLDERS:
        found += sorted((REPOSITORY / folder).rglob("*.py"))
    return found


@functools.cache
def tree_of(text: str) -> ast.Module:
    """The syntax tree of a source."""
    return ast.parse(text)


def dotted(node: ast.expr) -> str:
    """``torch.load`` of the expression that says so; empty for anything that is no dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def is_true(call: ast.Call, keyword: str) -> bool:
    return any(
        one.arg == keyword and isinstance(one.value, ast.Constant) and one.value.value is True for one in call.keywords
    )


def restricted_unpicklers(tree: ast.AST) -> set[ast.expr]:
    """``pickle.Unpickler`` where it is the base of a class that decides itself which names may be looked up."""
    bases = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            decides = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "find_class"]
            if decides and all(map(refuses, decides)):
                bases |= {base for base in node.bases if dotted(base) == "pickle.Unpickler"}
    return bases


def refuses(find_class: ast.FunctionDef) -> bool:
    """Whether it looks up no name without a condition, and ends with an error or with a class made on the spot."""
    last = find_class.body[-1]
    made = isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and dotted(last.value.func) == "type"
    if not isinstance(last, ast.Raise) and not made:
        return False
    guarded = {part for node in find_class.body if isinstance(node, ast.If) for part in ast.walk(node)}
    return all(node in guarded for node in ast.walk(find_class) if is_lookup(node))


def is_lookup(node: ast.AST) -> bool:
    """Whether it calls the ``find_class`` of another class, which imports what it is asked for."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "find_class"


def dangers(text: str) -> list[str]:
    """What runs, or might run, data; as ``line: what``."""
    tree = tree_of(text)
    restricted = restricted_unpicklers(tree)
    allowed = restricted | {base.value for base in restricted if isinstance(base, ast.Attribute)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                plain_pickle = alias.name == "pickle" and alias.asname is None
                if alias.name.split(".")[0] in UNPICKLERS and not plain_pickle:
                    found.append(f"{node.lineno}: import {alias.name}")
        elif isinstance(node, ast.Attribute) and dotted(node.value) == "pickle" and node not in allowed:
            if node.attr not in ("UnpicklingError", "PicklingError"):
                found.append(f"{node.lineno}: pickle.{node.attr}")
        elif isinstance(node, ast.Call):
            found += [f"{node.lineno}: {what}" for what in call_dangers(node)]
    return found


def call_dangers(call: ast.Call) -> list[str]:
    name = dotted(call.func)
    owner, _, last = name.rpartition(".")
    found = []
    if name in BUILTINS or name in SHELLS:
        found.append(name)
    if last == "load" and owner.split(".")[0] == "torch" and not is_true(call, "weights_only"):
        found.append(f"{name} without weights_only=True")
    if name in ("torch.jit.load", "torch.hub.load"):
        found.append(name)
    if owner == "yaml" and last in YAML_LOADERS:
        found.append(name)
    if owner in ("numpy", "np") and last in NUMPY_READERS and is_true(call, "allow_pickle"):
        found.append(f"{name} with allow_pickle")
    if is_true(call, "shell"):
        found.append(f"{name} with shell=True")
    if is_true(call, "trust_remote_code"):
        found.append(f"{name} with trust_remote_code")
    return found


def starts(text: str) -> list[str]:
    """Returns calls that start a process, as ``line: call``: any of them may run a script."""
    calls = [node for node in ast.walk(tree_of(text)) if isinstance(node, ast.Call)]
    names = [(call.lineno, dotted(call.func)) for call in calls]
    return [f"{line}: {name}" for line, name in names if name in PROCESSES or name.startswith(("os.exec", "os.spawn"))]


def test_processes_are_started_in_listed_files_only():
    found = {str(path.relative_to(REPOSITORY)) for path in sources() if starts(path.read_text())}
    assert found == set(STARTS)


@pytest.mark.parametrize(
    "text",
    [
        "subprocess.Popen([bash, script])",
        "subprocess.run(['bash', path], check=True)",
        "os.execv(bash, [bash, script])",
    ],
)
def test_start_of_a_script_is_found(text):
    assert starts(text)


def test_source_has_no_call_that_runs_data():
    paths = sources()
    assert len(paths) > 100, "the sources are elsewhere"
    found = {str(path.relative_to(REPOSITORY)): dangers(path.read_text()) for path in paths}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.load(file)",
        "import pickle\npickle.Unpickler(file).load()",
        "import pickle\nclass Careless(pickle.Unpickler):\n    pass",
        UNPICKLER.format("return super().find_class(module, name)"),
        UNPICKLER.format("found = super().find_class(module, name)\n        raise ValueError(found)"),
        UNPICKLER.format("if name in KNOWN:\n            return KNOWN[name]\n        return getattr(module, name)"),
        "import pickle as p",
        "from pickle import loads",
        "import marshal",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "torch.jit.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_dangerous_source_is_found(text):
    assert dangers(text)


def test_harmless_source_is_accepted():
    assert not dangers(UNPICKLER.format("raise ValueError(name)"))
    assert not dangers(UNPICKLER.format("return type(name, (Inert,), KNOWN)"))
    known = "if name in KNOWN:\n            return super().find_class(module, name)\n        raise ValueError(name)"
    assert not dangers(UNPICKLER.format(known))
    assert not dangers("torch.load(path, weights_only=True)\nyaml.safe_load(text)\nre.compile(text)\nmodel.eval()")
    assert not dangers("try:\n    pass\nexcept pickle.UnpicklingError:\n    pass")

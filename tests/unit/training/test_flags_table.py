"""docs/flags.md says of every flag how it is handled: the parser, the mapping and the refusals say the same."""

import argparse
import ast
import functools
import re
from pathlib import Path

import pytest

from docs.flags_table import with_refused_flags
from megatron_lancet.errors import UsageError
from megatron_lancet.registry import features
from megatron_lancet.training import arguments
from megatron_lancet.training.plan.flag_mapping import map_overlap_flags
from megatron_lancet.training.plan.select import choose_plan
from megatron_lancet.training.plan.support import OTHER_TASKS, Topic
from tests.unit.training.configs import config_with
from tests.unit.training.validated import set_as_validation_does

REPO = Path(__file__).parents[3]
STATUSES = {"works and tested", "works", "mapped", "refused", "no effect"}
WHOLE_GROUPS = {
    "transformer configuration",
    "moe",
    "mla",
    "experimental_attention_variant",
    "heterogeneous architecture",
    "Transformer-Engine",
    "distributed init",
}
OTHER_PROGRAMS = {"rl", "inference", "vision", "biencoder"}
OF_TRAINING_AMONG_THEM = {"--cuda-graph-modules", "--cuda-graph-scope"}
OF_ANOTHER_RUN = {flag for entry in OTHER_TASKS if entry.topic is Topic.RUN for flag in entry.flags.split()}
SUBJECTS = re.compile(
    r"moe|expert|recompute|overlap|parallel|fsdp|wgrad|dgrad|cuda-graph|offload|checkpoint-activations|^--spec$|"
    r"hybrid-(layer|override)|save-activations|max-attention"
)
RUN = (
    "--num-experts 8 --expert-model-parallel-size 2 --micro-batch-size 4 --transformer-impl local --hidden-dropout 0 "
    "--moe-token-dispatcher-type alltoall --attention-dropout 0 --seq-length 32"
).split()
# What a flag needs to be in, to be looked at.
TE = ["--transformer-impl", "transformer_engine"]
CONTEXT = {
    **dict.fromkeys(("--qk-clip", "--log-max-attention-logit", "--mla-down-proj-fusion"), TE),
    **dict.fromkeys(("--fp8-format", "--fp4-format", "--fp8-output-proj"), TE),
    "--moe-mlp-glu-interleave-size": [*TE, "--moe-grouped-gemm"],
    "--moe-router-padding-for-fp8": [*TE, "--fp8-format", "hybrid"],
    "--moe-router-padding-for-quantization": [*TE, "--fp8-format", "hybrid"],
    "--cp-comm-type": ["--context-parallel-size", "2"],
    "--recompute-modules": ["--recompute-granularity", "selective"],
}
VALUES = {
    "--hybrid-layer-pattern": ["*E"],
    "--hybrid-override-pattern": ["*E"],
    "--spec": ["mine", "layers"],
    "--cuda-graph-modules": ["attn"],
    "--cuda-graph-scope": ["attn"],
    "--transformer-impl": ["transformer_engine"],
    "--moe-token-dispatcher-type": ["flex"],
    "--cp-comm-type": ["allgather"],
    "--recompute-modules": ["moe", "core_attn"],
    "--moe-router-load-balancing-type": ["seq_aux_loss"],
    "--pipeline-model-parallel-layout": ["Et|tL"],
    "--moe-layer-freq": ["2"],
    "--linear-attention-freq": ["2"],
    "--expert-model-parallel-size": ["4"],
    "--distributed-backend": ["gloo"],
    "--num-experts": ["16"],
    "--softmax-type": ["vanilla"],
}

# What the model's settings call it, where tests build models without a command line.
FIELDS = {"--num-experts": "num_moe_experts"}


def tables() -> list[tuple[str, str, str]]:
    """(flag, status, the rest of the row) of all tables."""
    rows = []
    for line in (REPO / "docs/flags.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `--"):
            rows += [(flag, cells[1], " ".join(cells[2:])) for flag in re.findall(r"`(--[\w-]+)`", cells[0])]
    return rows


ROWS = tables()


@pytest.fixture(scope="module")
def parser():
    """Megatron's, with ours."""
    from megatron.training.arguments import add_megatron_arguments

    return arguments.add_lancet_arguments(
        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)), features()
    )


def listed_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options that the tables must have."""
    return [
        action
        for group in parser._action_groups
        for action in group._group_actions
        if group.title in WHOLE_GROUPS | {"Megatron-Lancet"}
        or action.option_strings[0] in OF_TRAINING_AMONG_THEM | OF_ANOTHER_RUN
        or (group.title not in OTHER_PROGRAMS and SUBJECTS.search(action.option_strings[0]))
    ]


def test_flags_table_lists_each_flag_once_and_no_other(parser):
    listed = [flag for flag, *_ in ROWS]
    assert sorted(listed) == sorted(action.option_strings[0] for action in listed_actions(parser))
    assert {status for _, status, _ in ROWS} == STATUSES


def test_flags_table_has_current_rows_of_refused_flags():
    document = (REPO / "docs/flags.md").read_text()
    assert with_refused_flags(document) == document, "docs/flags.md is not current: run make flags"


def words_for(action: argparse.Action, flag: str) -> list[str]:
    """The flag with a value that is not its default."""
    if flag in VALUES:
        return [flag, *VALUES[flag]]
    if action.nargs == 0:
        return [flag]
    if action.choices:
        return [flag, next(str(getattr(one, "name", one)) for one in action.choices if one != action.default)]
    is_text = action.type in (None, str)
    return [flag, "some" if is_text else "2"]


def what_becomes_of(args: argparse.Namespace, flag: str) -> str:
    args.rank, args.world_size = 0, 2
    set_as_validation_does(args)
    line = map_overlap_flags(args, config_with())
    if line is not None:
        assert flag in line
        return "mapped"
    try:
        arguments.check_modes(args)
        _, line = choose_plan(args, config_with())
    except UsageError as refusal:
        return "refused" if flag in str(refusal) else f"refused otherwise: {refusal}"
    return "refused" if line.startswith(f"off: {flag}") else "works"


MEGATRONS = [row for row in ROWS if not row[0].startswith(("--lancet", "--version"))]


def test_flags_have_the_status_that_the_table_says(parser):
    # One parser for all: it takes longer to build than to use.
    wrong = []
    for flag, status, _ in MEGATRONS:
        words = words_for(parser._option_string_actions[flag], flag)
        args = parser.parse_args([*RUN, *CONTEXT.get(flag, []), *words])
        found = what_becomes_of(args, flag)
        if found != (status if status in ("mapped", "refused") else "works"):
            wrong.append(f"{' '.join(words)}: {status} in docs/flags.md, {found} when parsed")
    assert wrong == []


def test_tested_flags_are_used_in_the_named_test(parser):
    files: dict[str, list[Path]] = {}
    for path in (REPO / "tests").rglob("test_*.py"):
        files.setdefault(path.stem, []).append(path)
    wrong = []
    for flag, status, why in ROWS:
        if status not in ("works and tested", "mapped"):
            continue
        named = re.findall(r"`(test_\w+)`", why)
        assert named, f"{flag}: no test is named"
        assert set(named) <= files.keys(), f"{flag}: {named}"
        if status == "mapped":
            continue  # the test before this one maps it
        action = parser._option_string_actions[flag]
        names = {*action.option_strings, action.dest, FIELDS.get(flag, action.dest)}
        if not any(used_words(path) & names for name in named for path in files[name]):
            wrong.append(f"{flag} is not in {', '.join(named)}")
    assert wrong == []


@functools.cache
def used_words(path: Path) -> frozenset[str]:
    """What a test file, its workers and what they import from tests/ pass on: keywords, attributes, words in strings.

    Not: docstrings, what is compared in an assertion, and expected messages.
    """
    return frozenset().union(*map(words_of, sources_of(path)))


@functools.cache
def words_of(path: Path) -> set[str]:
    """What one file passes on."""
    return words_in(tree_of(path))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def sources_of(path: Path, known: frozenset[Path] = frozenset()) -> frozenset[Path]:
    """A file of tests/, and those that it imports or starts as workers."""
    tree = tree_of(path)
    others = {path.with_name(text.rpartition("/")[2]) for text in strings_in(tree) if text.endswith("_worker.py")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            module = REPO.joinpath(*node.module.split("."))
            others |= {module.with_suffix(".py"), *(module / f"{name.name}.py" for name in node.names)}
    known |= {path}
    for other in others:
        if other not in known and other.is_file():
            known |= sources_of(other, known)
    return known


def words_in(tree: ast.AST) -> set[str]:
    words: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_message = isinstance(node, ast.keyword) and node.arg == "match"
        if is_docstring or is_message or isinstance(node, ast.Assert):
            continue
        words |= words_in(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set(node.value.split())
        elif isinstance(node, ast.keyword) and node.arg is not None:
            words.add(node.arg)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
    return words


def strings_in(tree: ast.AST) -> list[str]:
    nodes = ast.walk(tree)
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_words_of_messages_and_assertions_do_not_count_as_used():
    source = """
def test_one():
    '''About --a.'''
    with pytest.raises(UsageError, match="--b is refused"):
        run("--c 1", d=2)
    assert "--e" in output
"""
    assert words_in(ast.parse(source)) & {"--a", "--b", "--c", "d", "--e"} == {"--c", "d"}


@functools.cache
def names_of_tests() -> set[str]:
    """Names of the files with tests, and of the tests in them."""
    files = [*(REPO / "tests").rglob("test_*.py")]
    names = (re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE) for file in files)
    return {file.stem for file in files}.union(*names)


@pytest.mark.parametrize("path", sorted((REPO / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_documents_name_tests_that_exist(path):
    named = {
        Path(name).name.removesuffix(".py")
        for name in re.findall(r"`((?:[\w/]+/)?test_\w+(?:\.py)?)`", path.read_text())
    }
    assert named <= names_of_tests(), named - names_of_tests()

"""Dry runs of Megatron-LM's own MoE recipes: ``python -m benchmarks.dry_run_recipes MEGATRON_LM_CHECKOUT``.

A recipe is a ``model_config.yaml`` of Megatron-LM's functional tests: arguments (``MODEL_ARGS``) and environment
(``ENV_VARS``) of a run of its ``pretrain_gpt.py``. Those that train a model with experts are validated as they are, in
one process, on nodes of 8 GPUs as its tests have them: once with their environment, and once without, to see which
variables the dry run then names. Ends with status 1 if one is refused that megatron-core's parser knows and
``pretrain_gpt_moe.py`` can build.
"""

import argparse
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock

from megatron_lancet.errors import UsageError
from megatron_lancet.lab.dry_run.report import Findings
from megatron_lancet.lab.dry_run.run import examine

_PATTERN = "tests/functional_tests/test_cases/*/*/model_config.yaml"
_GPUS_OF_A_NODE = 8
_OTHER_PROGRAMS = ("inference", "rl")
"""Values of ``MODE`` of recipes that do not train a model on text."""
_NAMED = re.compile(r"([A-Z_0-9]+) is not set: ")
_ENTRY = re.compile(r"(?P<indent>\s*)(?P<key>[^\s:#][^:]*):(?:\s+(?P<value>.*))?")
_OF_ITS_CLUSTER = {"TOKENIZER_TYPE": "TikTokenizer"}
"""Values of variables that name no path, which its cluster sets."""


@dataclass(frozen=True)
class Recipe:
    """Arguments and environment of one run.

    Attributes:
        name: its folder.
        mode: what it does; ``pretraining`` where it does not say.
        words: the command line, without the script.
    """

    name: str
    mode: str
    words: list[str]
    environment: dict[str, str]


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe. Its mappings are one level deep, with one entry a line, which needs no YAML library."""
    sections: dict[str, dict[str, str]] = {}
    scalars: dict[str, str] = {}
    section = ""
    for line in path.read_text().splitlines():
        found = _ENTRY.fullmatch(line)
        if found is None or line.lstrip().startswith("#"):
            continue
        key, value = found["key"].strip(), _scalar(found["value"] or "")
        if not found["indent"]:
            section = key
            scalars[key] = value
        else:
            sections.setdefault(section, {})[key] = value
    words = [word for flag, value in sections.get("MODEL_ARGS", {}).items() for word in _words(flag, value)]
    return Recipe(path.parent.name, scalars.get("MODE", "pretraining"), words, sections.get("ENV_VARS", {}))


def _scalar(text: str) -> str:
    """The value of an entry without its quotes and comment."""
    text = text.strip()
    if text[:1] in ("'", '"'):
        return text[1 : text.index(text[0], 1)]
    return re.split(r"\s#", text)[0].strip()


def _words(flag: str, value: str) -> list[str]:
    """The words of one argument, as the script of the functional tests makes them.

    ``true`` and no value are a bare flag, brackets hold several words, and a value in parentheses is one word.
    """
    if not flag.startswith("--") or value in ("true", ""):
        return [flag] if flag.startswith("--") else []
    value = re.sub(r"\$\{(\w+)\}", lambda found: _OF_ITS_CLUSTER.get(found[1], f"/{found[1]}"), value)
    if value.startswith("["):
        return [flag, *shlex.split(value.strip("[]"))]
    return [flag, value]


@contextmanager
def _as_started(words: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Inside the context this process has the recipe's command line, and its environment alone."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    argv = ["pretrain_gpt.py", "--lancet-dry-run", *words]
    with mock.patch.dict(os.environ, {**kept, **environment}, clear=True), mock.patch.object(sys, "argv", argv):
        yield


def examined(recipe: Recipe, environment: Mapping[str, str]) -> Findings:
    """Runs a recipe dry, on as many nodes as its layout needs.

    Raises:
        UsageError: it is refused.
    """
    with _as_started(recipe.words, environment):
        findings = examine()
        num_ranks = -(-findings.layout.num_ranks // _GPUS_OF_A_NODE) * _GPUS_OF_A_NODE
        if num_ranks == findings.layout.num_ranks:
            return findings
        sys.argv += ["--lancet-world-size", str(num_ranks)]
        return examine()


def outcome_of(recipe: Recipe) -> tuple[str, str]:
    """``passed`` with the plan and the variables that are named, ``refused`` or ``other`` with the reason."""
    if recipe.mode in _OTHER_PROGRAMS:
        return "other", f"MODE {recipe.mode}"
    if "M" in next((after for flag, after in pairwise(recipe.words) if flag == "--hybrid-layer-pattern"), ""):
        return "other", "Mamba layers, which pretrain_gpt_moe.py does not build"
    try:
        plan = examined(recipe, recipe.environment).plan[0].split(";")[0]
        named = [found[1] for line in examined(recipe, {}).warnings if (found := _NAMED.match(line))]
    except UsageError as error:
        if str(error).startswith("unrecognized arguments"):
            return "other", "flags of another program or version"
        return "refused", str(error)
    return "passed", f"{plan}; without its environment: {', '.join(named) or 'nothing'} is named"


def main() -> int:
    """Prints a row for each recipe, and how many passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dry_run_recipes", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    options = parser.parse_args()
    recipes = [read_recipe(path) for path in sorted(options.checkout.glob(_PATTERN))]
    recipes = [recipe for recipe in recipes if "--num-experts" in recipe.words and options.only in recipe.name]
    if not recipes:
        print(f"error: no recipe with --num-experts at {options.checkout / _PATTERN}", file=sys.stderr)
        return 2
    counts: Counter[str] = Counter()
    for recipe in recipes:
        state, reason = outcome_of(recipe)
        counts[state] += 1
        print(f"{state:8} {recipe.name}: {reason}", flush=True)
    num_ours = counts["passed"] + counts["refused"]
    print(f"{counts['passed']} of {num_ours} recipes passed; {counts['other']} others are not for pretrain_gpt_moe.py")
    return 1 if counts["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())

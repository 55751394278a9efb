"""Prints the table of fp8 errors in docs/support.md: python -m benchmarks.parts.fp8_accuracy.

It runs the models of tests/parity/te/test_fp8.py on two CPU ranks, with Transformer Engine's real Python and
plain torch for its kernels. Errors are relative to the norm of a parameter's fp32 gradient on the same weights.
"""

import tempfile
from pathlib import Path

from benchmarks.harness.tables import markdown
from tests.parity.te.fp8_worker import BLACKWELL, HOPPER, RECIPES, results_of_recipes
from tests.ranks import launch

_WHOLE = "k=1"
"""Equal to stock to the bit."""
_TABLED = ("delayed", "tensorwise", "blockwise", "mxfp8")


def main() -> None:
    """Runs the worker of the tests, and prints the errors of its recipes on rank 0."""
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for recipes, device in ((HOPPER, launch.Te()), (BLACKWELL, launch.Te((10, 0)))):
        names = [name for name in recipes if name in _TABLED]
        with tempfile.TemporaryDirectory() as folder:
            found = launch.results_of(results_of_recipes, 2, Path(folder), timeout_s=300, args=names, te=device)[0]
        errors |= {name: found[name]["errors"] for name in names}
    rows = [
        [f"`{name}`, {RECIPES[name].settings['fp8']}", plan, f"{error['median']:.3f}", f"{error['worst']:.3f}"]
        for name in _TABLED
        for plan, error in errors[name].items()
        if plan != _WHOLE
    ]
    print(markdown([["recipe", "chunks", "median parameter", "worst parameter"], *rows]))


if __name__ == "__main__":
    main()

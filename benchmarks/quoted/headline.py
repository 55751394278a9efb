"""The first table of docs/performance.md: our schedules and Megatron's own overlap where stock waits for 45 %."""

from benchmarks.harness.tables import markdown
from benchmarks.network.cases import ACCUMULATED, CHUNKED, MEGATRON, MEGATRON_DELAYED, PAIRED_CASES, TE_CASE
from benchmarks.quoted.cells import NOT_RUN
from benchmarks.quoted.network import Measured, dates, measured

_FOLDER = "../benchmarks/results"
"""Path from docs/performance.md to the result files."""
_STEPS = {
    "45": "one micro-batch, forward and backward",
    "optimizer": "the same, with gradient reduction and Adam",
    ACCUMULATED: "two micro-batches, forward and backward",
    "45-m4": "four, a smaller model",
    "45-m8": "eight, the same model",
    TE_CASE: "four, Transformer Engine's layers with stand-in kernels",
}
"""Description of a step, by case."""
_COLUMNS = {
    CHUNKED: "two chunks",
    "paired-k1": "pairs, no chunks",
    MEGATRON: "Megatron's overlap, emulated",
    MEGATRON_DELAYED: "with `--delay-wgrad-compute`",
}


def headline() -> str:
    """Returns speed-up and memory of four schedules over stock, with the range of several runs."""
    cases = measured(("45", "optimizer", ACCUMULATED, *PAIRED_CASES))
    lines = [["a step is", "stock waits for", *_COLUMNS.values(), "measured"]]
    for name, text in _STEPS.items():
        if name in cases:
            case = cases[name]
            waits = f"{case.runs[0].summary.exposed_share:.0%}"
            cells = [_cell(case, variant) for variant in _COLUMNS]
            lines.append([f"{text} (`{name}`)", waits, *cells, dates(case, _FOLDER)])
    return markdown(lines)


def _cell(case: Measured, name: str) -> str:
    row = case.row(name)
    return NOT_RUN if row is None else case.cell(name, f"memory {row.memory_ratio:.2f}")

"""The table of documents in bins: their tokens per second in each way of packing."""

from benchmarks.bins.summary import summarise
from benchmarks.harness.tables import markdown
from benchmarks.quoted.cells import NO_RESULT, quartiles
from benchmarks.quoted.results import newest


def bins() -> str:
    """Every variant of every case."""
    lines = [["case", "variant", "tokens/s", "of first fit's, a step (quartiles)", "all steps"]]
    lines[0] += ["spread over ranks", "waits", "padding", "step"]
    for case, quoted in newest("bins").items():
        summary = summarise(quoted.case)
        name = f"[`{case}`](../../benchmarks/results/{quoted.file}){quoted.mark}"
        for row in summary.rows:
            speed = [f"{row.tokens_per_s:.0f}", quartiles(row.over_baseline), f"{row.all_over_baseline:.2f}"]
            shares = [f"{row.spread:.1%}", f"{row.waits:.0%}", f"{row.padding:.0%}"]
            lines.append([name, f"`{row.name}`", *speed, *shares, f"{row.step_ms:.0f} ms"])
    return markdown(lines) if len(lines) > 1 else NO_RESULT


TABLES = {"bins": bins}

"""Puts a run of the short demo into the repository: python docs/demo_figures.py runs/demo/summary.json

It copies the run's summary to ``benchmarks/results/demo-DATE.json`` and its picture to ``docs/demo_steps.png``, and
writes the sentence of ``docs/performance.md`` from that file. Without an argument it rewrites the page from the newest
such file. Run ``make demo`` on a quiet machine first: the demo prints DISTURBED if something else used its cores.
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.demo.claim import claim, conditions, disturbance_text  # noqa: E402 needs the repository in the path
from benchmarks.demo.folder import Folder  # noqa: E402
from benchmarks.demo.training_log.training_process import say  # noqa: E402
from benchmarks.harness.origin import described  # noqa: E402
from megatron_lancet.errors import UsageError, run_command  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results"
PICTURE = REPOSITORY / "docs" / "demo_steps.png"
PAGE = REPOSITORY / "docs" / "performance.md"


def record(summary: Path, results: Path = RESULTS, picture: Path = PICTURE) -> Path:
    """Copies a run's summary and its picture into the repository; returns the result file.

    Raises:
        UsageError: there is no summary of a short demo.
    """
    folder = Folder(summary.parent if summary.suffix else summary)
    try:
        found = json.loads(folder.summary.read_text())
    except OSError as error:
        raise UsageError(f"expected summary.json of the short demo in {folder.root}. Run make demo first.") from error
    if "samples" not in found:
        raise UsageError(f"{folder.summary} has no samples: it is from the long demo or an older demo. Run make demo.")
    origin = found.pop("origin")
    path = results / _name(origin)
    path.write_text(json.dumps({**origin, **found}) + "\n")
    shutil.copyfile(folder.timelines, picture)
    return path


def _name(origin: Mapping[str, Any]) -> str:
    return f"demo-{origin['date']}.json"


def newest(results: Path = RESULTS) -> Path:
    """Returns the result file that the page quotes."""
    return max(results.glob("demo-*.json"))


def sentence(result: Mapping[str, Any]) -> str:
    """Returns the page's text between the markers.

    Args:
        result: contents of a result file.
    """
    summary = {**result, "origin": result}
    disturbed = f" DISTURBED: {doubts}." if (doubts := disturbance_text(summary)) else ""
    where = described({**result, "versions": {}, "settings": {}})  # the file has them
    samples = f"[samples](../benchmarks/results/{_name(result)})"
    quote = f"**{claim(summary)}** {conditions(summary)} ({where}; {summary['link']}; {samples}.{disturbed})"
    return f"> {quote}"


def with_figures(text: str, result: Mapping[str, Any]) -> str:
    """Returns ``text``, the page, with the sentence of a result file.

    Raises:
        ValueError: the page lacks the markers.
    """
    begin, end = "<!-- demo sentence: docs/demo_figures.py -->\n", "\n<!-- end of demo sentence -->"
    place = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
    found = len(place.findall(text))
    if found != 1:
        raise ValueError(f"the page has {found} places for the demo's sentence")
    return place.sub(partial(_replaced, sentence(result)), text)


def _replaced(content: str, _: re.Match[str]) -> str:
    return content


def main() -> None:
    """Record a run if one is named, and write the page."""
    path = record(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else newest()
    PAGE.write_text(with_figures(PAGE.read_text(), json.loads(path.read_text())))
    say(f"wrote {PAGE.name} from {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    run_command(main)

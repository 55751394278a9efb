"""Puts a run of the short demo into the README, its picture too: python docs/demo_figures.py [runs/demo].

Run ``make demo`` on a quiet machine first: the demo says DISTURBED where something else used its cores.
"""

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.demo.folder import Folder  # noqa: E402 the repository is in the path only now
from benchmarks.demo.short_run import closing_text  # noqa: E402
from benchmarks.demo.steps import sentence  # noqa: E402

PICTURE = REPOSITORY / "docs" / "demo_steps.png"
README = REPOSITORY / "README.md"
_COLUMNS = 118


def parts(folder: Folder, summary: dict[str, Any]) -> dict[str, str]:
    """What is between the marks of each name."""
    origin = summary["origin"]
    machine = f"{origin['machine']['cores']} cores of {origin['machine']['processor']}"
    where = f"`make demo`, {origin['date']}, commit {str(origin['commit'])[:7]}, {machine}; {summary['link']}."
    text = sentence(summary)
    disturbed = f" DISTURBED: {summary['other_load']}." if summary["other_load"] else ""
    quote = f"**{text[0].upper()}{text[1:]}.** ({where}{disturbed})"
    sample = textwrap.indent(summary["sample"]["prompt"] + summary["sample"]["text"], "      | ").splitlines()
    output = ["[7/8] sample from the trained model", *sample[:2], "      ...", closing_text(folder, summary)]
    return {
        "sentence": textwrap.indent(textwrap.fill(quote, _COLUMNS), "> "),
        "output": "```\n" + "\n".join(output) + "\n```",
    }


def main() -> None:
    """Read the run, write the README and the picture."""
    folder = Folder(Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "runs" / "demo").resolve())
    summary = json.loads(folder.summary.read_text())
    text = README.read_text()
    for name, content in parts(folder, summary).items():
        before, begin, rest = text.partition(f"<!-- demo {name}: docs/demo_figures.py -->\n")
        _, end, after = rest.partition(f"\n<!-- end of demo {name} -->")
        assert end, f"{README} has no place for the demo's {name}"
        text = f"{before}{begin}{content}{end}{after}"
    README.write_text(text)
    shutil.copyfile(folder.timelines, PICTURE)


if __name__ == "__main__":
    main()

"""Draw docs/report_timeline.png from a run's timeline.html, with a headless Chromium: report_picture.py PAGE PNG."""

import sys
import tempfile
from pathlib import Path

from tests.cli.report.chromium import Browser, path_of_chromium

WIDTH, HEIGHT = 1200, 1000


def main() -> None:
    """Open the page and save a screenshot."""
    program = path_of_chromium()
    if program is None:
        sys.exit("error: no Chromium was found; apt-get install chromium")
    page, picture = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as profile, Browser(program, Path(profile)) as browser:
        browser.scheme("light")
        browser.open(page.resolve(), WIDTH, HEIGHT)
        browser.screenshot(picture)


if __name__ == "__main__":
    main()

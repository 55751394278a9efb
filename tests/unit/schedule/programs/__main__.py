"""Compares the frozen programs with those that the table makes now, or writes them.

Usage: python -m tests.unit.schedule.programs [--write]
"""

import argparse
import sys

from tests.unit.schedule.programs.cases import CASES
from tests.unit.schedule.programs.frozen import FOLDER, REPEAT, difference, programs_of, text_of


def main() -> int:
    parser = argparse.ArgumentParser(prog=REPEAT.removesuffix(" --write"), description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write all files, and delete those of no plan")
    write = parser.parse_args().write
    files = {FOLDER / f"{name}.txt": text_of(case, programs_of(case)) for name, case in CASES.items()}
    different = []
    for path in sorted({*files, *FOLDER.glob("*.txt")}):
        before, now = path.read_text() if path.exists() else "", files.get(path, "")
        if before == now:
            continue
        different.append(path)
        sys.stdout.write(f"{difference(path.stem, before, now)}\n")
        if write and now:
            path.write_text(now)
        elif write:
            path.unlink()
    sys.stdout.write(f"{len(different)} files {'changed' if write else 'differ'}, of {len(files)} plans\n")
    return int(bool(different) and not write)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.cli.mistakes`` plays the mistakes and prints a table of them. Fails if one ends in another way."""

import socket
import sys
import tempfile
from pathlib import Path

from tests import data
from tests.cli.mistakes.cases import COMMANDS, TRAININGS
from tests.cli.mistakes.play import flaws, make_files, play_all


def main() -> int:
    """Returns the number of mistakes that end in another way than expected."""
    num_flawed = 0
    with tempfile.TemporaryDirectory() as name, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        folder = Path(name)
        (folder / "files").mkdir()
        files = make_files(folder / "files", data.write_tokens(folder / "tokens_document"), taken.getsockname()[1])
        sys.stdout.write("case | exit | line | seconds\n")
        for mistakes, is_training in ((TRAININGS, True), (COMMANDS, False)):
            ends = play_all(mistakes, files, folder / f"logs{is_training:d}", is_training)
            for case, mistake in mistakes.items():
                end = ends[case]
                said = (line for line in end.output.splitlines() if mistake.message.format(**files) in line)
                shown = f"{case}: {mistake.words}" if is_training else f"lancet {mistake.words}"
                line = end.last_line if mistake.status else next(said, end.last_line)
                row = f"{shown} | {end.status} | {line} | {end.seconds:.1f}".replace(f"{folder / 'files'}/", "")
                sys.stdout.write(row.replace(f"{folder}/", "") + "\n")
                for flaw in flaws(mistake, end, files):
                    num_flawed += 1
                    sys.stdout.write(f"    UNEXPECTED: {flaw}\n")
        sys.stdout.write(f"{len(TRAININGS) + len(COMMANDS)} mistakes, {num_flawed} unexpected ends\n")
    return num_flawed


if __name__ == "__main__":
    sys.exit(min(main(), 1))

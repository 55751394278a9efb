"""Write the tables anew; with result files as arguments, print all tables of these instead."""

import sys
from pathlib import Path

from benchmarks.quoted import beside
from benchmarks.quoted.tables import main

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write("\n".join(beside.made(Path(name)) for name in sys.argv[1:]))
    else:
        main()

"""python -m benchmarks.quoted: regenerates the documents' tables."""

from benchmarks.quoted.tables import main

main()

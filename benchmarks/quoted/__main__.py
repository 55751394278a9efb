"""python -m benchmarks.quoted: writes the documents' tables anew."""

from benchmarks.quoted.tables import main

main()

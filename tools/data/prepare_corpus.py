"""Converts a folder of text or code to a JSONL corpus for ``lancet data tokenizer`` and ``lancet data encode``.

  lancet data corpus --input ~/texts --output corpus.jsonl --extensions .txt .md
  lancet data corpus --documents functions --output functions.jsonl
  lancet data corpus --documents pairs --output pairs.jsonl

The last two cut Python sources, by default the standard library's, into functions: short and long documents as
they occur. A pair has the keys prompt (signature and docstring) and answer (the body).
"""

import argparse
import codecs
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.cli.arguments import positive_float, require_output_folder
from megatron_lancet.data.functions import UnparsableError, classes, functions, pairs
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_outputs

BYTES_PER_MEGABYTE = 1_000_000
DEFAULT_EXTENSIONS = (".py", ".pyi", ".txt", ".md", ".rst")
PYTHON_EXTENSION = ".py"
STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


type Record = Mapping[str, str]
"""Texts of one document by their keys."""


def _file(text: str, _: str) -> Iterator[tuple[str, Record]]:
    """The whole file; none without text."""
    if text:
        yield "", {"text": text}


def _functions(text: str, name: str) -> Iterator[tuple[str, Record]]:
    return ((f":{part}", {"text": source}) for part, source in functions(text, name))


def _classes(text: str, name: str) -> Iterator[tuple[str, Record]]:
    return ((f":{part}", {"text": source}) for part, source in classes(text, name))


def _pairs(text: str, name: str) -> Iterator[tuple[str, Record]]:
    return ((f":{part}", pair._asdict()) for part, pair in pairs(text, name))


CUTS: dict[str, Callable[[str, str], Iterator[tuple[str, Record]]]] = {
    "files": _file,
    "functions": _functions,
    "classes": _classes,
    "pairs": _pairs,
}
"""From the text of a file and its name to its documents, each with what is to be appended to the name."""


@dataclass(frozen=True)
class Source:
    """Source of documents.

    Attributes:
        folder: folder to search with all its subfolders, except hidden ones and ``__pycache__``.
        skipped_folders: further folder names to skip, at any depth.
        honours_coding_cookies: decode ``.py`` files as Python would (PEP 263) instead of as UTF-8.
    """

    folder: Path
    skipped_folders: frozenset[str] = frozenset()
    honours_coding_cookies: bool = False


@dataclass
class Summary:
    """Counts of one run; ``num_text_bytes`` is the size of the texts in UTF-8."""

    num_documents: int = 0
    num_text_bytes: int = 0
    num_undecodable: int = 0
    num_unparsable: int = 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        type=Path,
        metavar="DIR",
        help="folder of text files (default: the standard library sources of the running Python, without tests)",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file, in an existing folder")
    parser.add_argument(
        "--documents",
        choices=tuple(CUTS),
        default="files",
        help="what becomes a document: files (default); functions and methods, or classes, of Python sources; or pairs "
        "of a function's signature with docstring and its body",
    )
    parser.add_argument(
        "--extensions",
        nargs="+",
        metavar="EXT",
        help=f"file extensions to include (default: {' '.join(DEFAULT_EXTENSIONS)}; {PYTHON_EXTENSION} if the files "
        "are cut)",
    )
    parser.add_argument(
        "--max-megabytes",
        type=positive_float,
        metavar="N",
        help="stop before the texts exceed N million bytes of UTF-8",
    )
    parser.add_argument(
        "--skip-undecodable",
        action="store_true",
        help="skip and count files that are not UTF-8, or no Python source if they are to be cut, instead of stopping "
        "at the first one",
    )
    arguments = parser.parse_args(argv)
    if arguments.extensions is None:
        arguments.extensions = DEFAULT_EXTENSIONS if arguments.documents == "files" else (PYTHON_EXTENSION,)
    return arguments


def select_source(folder: Path | None) -> Source:
    """Returns the given folder or the standard library."""
    if folder is None:
        stdlib = Path(sysconfig.get_path("stdlib"))
        return Source(stdlib, STDLIB_SKIPPED_FOLDERS, honours_coding_cookies=True)
    if not folder.is_dir():
        raise UsageError(f"--input {folder} is not a folder; expected a folder of text files")
    return Source(folder)


def find_files(source: Source, extensions: Sequence[str], excluded: Path) -> list[Path]:
    """Returns regular files with one of the extensions, sorted by path, without the output file ``excluded``.

    Raises:
        UsageError: there are no such files.
    """
    endings = tuple("." + extension.lower().lstrip(".") for extension in extensions)
    skipped = source.skipped_folders | {"__pycache__"}
    found: list[Path] = []
    for folder, subfolders, names in os.walk(source.folder):
        # os.walk descends into what is left of the list: pruning must happen in place.
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.lower().endswith(endings)]
    files = [path for path in found if path.is_file() and path.resolve() != excluded.resolve()]
    if not files:
        raise UsageError(
            f"no file ending in {' '.join(endings)} under {source.folder}; name the endings with --extensions"
        )
    return sorted(files, key=lambda path: path.relative_to(source.folder).as_posix())


def read_text(path: Path, honours_coding_cookies: bool) -> str:
    """Returns the content of a file with unchanged line ends and without a byte order mark.

    Raises:
        UsageError: the file is not in UTF-8 (or its declared encoding), or can't be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    encoding = "utf-8"
    if honours_coding_cookies and path.suffix == ".py":
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        except SyntaxError as error:
            raise UndecodableError(f"{path}: {error.msg}; skip such files with --skip-undecodable") from error
    num_mark_bytes = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[num_mark_bytes:].decode("utf-8" if encoding == "utf-8-sig" else encoding)
    except UnicodeDecodeError as error:
        offset = num_mark_bytes + error.start
        raise UndecodableError(
            f"{path}: expected {error.encoding}, found byte 0x{data[offset]:02x} at byte offset {offset};"
            " convert the file or leave such files out with --skip-undecodable"
        ) from error


class UndecodableError(UsageError):
    """A file is not in the encoding it should have."""


def iter_documents(
    source: Source, files: Sequence[Path], documents: str, skip_undecodable: bool, summary: Summary
) -> Iterator[tuple[str, Record]]:
    """Yields (path relative to the input, texts) of every document; counts skipped files in ``summary``.

    Args:
        documents: one of :data:`CUTS`.
    """
    for path in files:
        # A file name may be any bytes, a JSON string may not.
        name = os.fsencode(path.relative_to(source.folder).as_posix()).decode("utf-8", "replace")
        try:
            # As a list: of a file that can't be parsed nothing is written.
            found = list(CUTS[documents](read_text(path, source.honours_coding_cookies), str(path)))
        except UndecodableError:
            if not skip_undecodable:
                raise
            summary.num_undecodable += 1
        except UnparsableError:
            if not skip_undecodable:
                raise
            summary.num_unparsable += 1
        else:
            yield from ((name + part, record) for part, record in found)


def write_corpus(
    documents: Iterator[tuple[str, Record]],
    output: Path,
    max_bytes: float,
    summary: Summary,
) -> None:
    """Writes documents as JSONL until the texts would exceed ``max_bytes``; counts them in ``summary``."""
    with output.open("w", encoding="utf-8", newline="\n") as file:
        for name, record in documents:
            num_bytes = sum(len(text.encode("utf-8")) for text in record.values())
            if summary.num_text_bytes + num_bytes > max_bytes:
                return
            file.write(json.dumps({**record, "path": name}, ensure_ascii=False) + "\n")
            summary.num_documents += 1
            summary.num_text_bytes += num_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    require_output_folder(arguments.output)
    source = select_source(arguments.input)
    files = find_files(source, arguments.extensions, excluded=arguments.output)
    max_bytes = (arguments.max_megabytes or float("inf")) * BYTES_PER_MEGABYTE
    summary = Summary()
    with atomic_outputs(arguments.output) as (temporary,):
        documents = iter_documents(source, files, arguments.documents, arguments.skip_undecodable, summary)
        write_corpus(documents, temporary, max_bytes, summary)
        if summary.num_documents == 0:
            raise UsageError(
                f"no document to write: all {len(files)} files under {source.folder} are empty,"
                f" undecodable or without {arguments.documents}, or the first document exceeds --max-megabytes"
            )
    skipped = f", {summary.num_undecodable} undecodable files skipped" if summary.num_undecodable else ""
    if summary.num_unparsable:
        skipped += f", {summary.num_unparsable} files skipped that can't be parsed"
    megabytes = summary.num_text_bytes / BYTES_PER_MEGABYTE
    print(f"{arguments.output}: {summary.num_documents} documents, {megabytes:.2f} MB of text{skipped}")


if __name__ == "__main__":
    run_command(main)

"""The corpus holds the exact text of the right files, in a fixed order, or nothing."""

import json
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megatron_lancet.errors import UsageError


def write_files(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def read_corpus(path: Path) -> dict[str, str]:
    """Texts by path, in the order of the file."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert all(list(record) == ["text", "path"] for record in records)
    return {record["path"]: record["text"] for record in records}


def test_corpus_has_exact_text_of_matching_files_in_sorted_order(
    tmp_path: Path, prepare_corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_files(
        tmp_path / "source",
        {
            "b.txt": b"tab\there\r\n\n  spaces  \n",
            "a/z.MD": "é 日本 👩‍👩‍👧\n".encode(),
            "a.txt": b"\xef\xbb\xbfno mark",
            "empty.txt": b"",
            "image.png": b"\x89PNG",
            "__pycache__/c.txt": b"cache",
            ".git/d.txt": b"hidden",
            "tests/e.txt": b"the user's own tests stay",
        },
    )
    output = tmp_path / "corpus.jsonl"
    prepare_corpus.main(["--input", str(source), "--output", str(output), "--extensions", "txt", ".md"])
    documents = read_corpus(output)
    assert documents == {
        "a.txt": "no mark",
        "a/z.MD": "é 日本 👩‍👩‍👧\n",
        "b.txt": "tab\there\r\n\n  spaces  \n",
        "tests/e.txt": "the user's own tests stay",
    }
    assert list(documents) == sorted(documents)
    assert capsys.readouterr().out == f"{output}: 4 documents, 0.00 MB of text\n"


def test_corpus_output_inside_the_input_is_not_an_input(tmp_path: Path, prepare_corpus: ModuleType) -> None:
    source = write_files(tmp_path / "source", {"a.txt": b"text"})
    arguments = ["--input", str(source), "--output", str(source / "corpus.txt")]
    prepare_corpus.main(arguments)
    first = (source / "corpus.txt").read_bytes()
    prepare_corpus.main(arguments)
    assert (source / "corpus.txt").read_bytes() == first


def test_corpus_default_is_the_standard_library(
    tmp_path: Path, prepare_corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "corpus.jsonl"
    prepare_corpus.main(["--output", str(output)])
    documents = read_corpus(output)
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert documents["json/decoder.py"] == (stdlib / "json" / "decoder.py").read_text("utf-8")
    skipped = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not [path for path in documents if skipped & set(path.split("/"))]
    num_bytes = sum(len(text.encode()) for text in documents.values())
    summary = capsys.readouterr().out
    assert f"{len(documents)} documents, {num_bytes / 1e6:.2f} MB" in summary

    again = tmp_path / "again.jsonl"
    prepare_corpus.main(["--output", str(again)])
    assert again.read_bytes() == output.read_bytes()


def test_only_the_standard_library_declares_other_encodings(
    tmp_path: Path, prepare_corpus: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_files(
        tmp_path / "lib",
        {
            "latin.py": b"# -*- coding: latin-1 -*-\nname = '\xe9'\n",
            "plain.py": "name = 'é'\n".encode(),
            "json/tests/x.py": b"\xff",
            "site-packages/y.py": b"\xff",
        },
    )
    output = tmp_path / "corpus.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(prepare_corpus.sysconfig, "get_path", lambda _name: str(source))
        prepare_corpus.main(["--output", str(output)])
    assert read_corpus(output) == {
        "latin.py": "# -*- coding: latin-1 -*-\nname = 'é'\n",
        "plain.py": "name = 'é'\n",
    }
    with pytest.raises(UsageError, match=r"tests/x\.py: expected utf-8, found byte 0xff at byte offset 0"):
        prepare_corpus.main(["--input", str(source / "json"), "--output", str(output)])


@pytest.mark.parametrize("cookie", [b"# coding: no-such-codec\n", b"# coding: latin-1\n\xef"])
def test_wrong_coding_cookie_of_the_standard_library(
    tmp_path: Path, prepare_corpus: ModuleType, monkeypatch: pytest.MonkeyPatch, cookie: bytes
) -> None:
    content = cookie if b"latin" not in cookie else b"\xef\xbb\xbf" + cookie
    source = write_files(tmp_path / "lib", {"bad.py": content, "good.py": b"x = 1\n"})
    monkeypatch.setattr(prepare_corpus.sysconfig, "get_path", lambda _name: str(source))
    output = tmp_path / "corpus.jsonl"
    with pytest.raises(UsageError, match=r"bad\.py"):
        prepare_corpus.main(["--output", str(output)])
    prepare_corpus.main(["--output", str(output), "--skip-undecodable"])
    assert read_corpus(output) == {"good.py": "x = 1\n"}


def test_undecodable_file_stops_or_is_counted(
    tmp_path: Path, prepare_corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {"a.txt": b"ok", "b.txt": b"\xef\xbb\xbfab\xe9", "c.txt": b"\xff"}
    source = write_files(tmp_path / "source", contents)
    output = tmp_path / "corpus.jsonl"
    output.write_text("older")
    arguments = ["--input", str(source), "--output", str(output)]
    with pytest.raises(UsageError, match=r"b\.txt: expected utf-8, found byte 0xe9 at byte offset 5;"):
        prepare_corpus.main(arguments)
    assert output.read_text() == "older"
    assert sorted(tmp_path.iterdir()) == [output, source]

    prepare_corpus.main([*arguments, "--skip-undecodable"])
    assert read_corpus(output) == {"a.txt": "ok"}
    assert capsys.readouterr().out.endswith("1 documents, 0.00 MB of text, 2 undecodable files skipped\n")


def test_limit_counts_bytes_of_text(tmp_path: Path, prepare_corpus: ModuleType) -> None:
    contents = {"a.txt": b"a" * 60, "b.txt": "é".encode() * 20, "c.txt": b"c"}
    source = write_files(tmp_path / "source", contents)
    output = tmp_path / "corpus.jsonl"
    arguments = ["--input", str(source), "--output", str(output), "--max-megabytes"]
    prepare_corpus.main([*arguments, "0.0001"])
    assert list(read_corpus(output)) == ["a.txt", "b.txt"]
    prepare_corpus.main([*arguments, "0.000099"])
    assert list(read_corpus(output)) == ["a.txt"]
    with pytest.raises(UsageError, match="exceeds --max-megabytes"):
        prepare_corpus.main([*arguments, "0.00001"])


def test_corpus_refuses_unusable_arguments(tmp_path: Path, prepare_corpus: ModuleType) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    blank = write_files(tmp_path / "blank", {"a.txt": b""})
    output = tmp_path / "corpus.jsonl"
    for folder, reason in (
        (tmp_path / "none", "is not a folder"),
        (empty, r"no file ending in \.py .* under "),
        (blank, "no document to write"),
    ):
        with pytest.raises(UsageError, match=reason):
            prepare_corpus.main(["--input", str(folder), "--output", str(output)])
    with pytest.raises(UsageError, match=r"output folder .*none does not exist"):
        prepare_corpus.main(["--output", str(tmp_path / "none" / "corpus.jsonl")])
    with pytest.raises(UsageError, match="is an existing folder"):
        prepare_corpus.main(["--output", str(empty)])
    assert sorted(tmp_path.iterdir()) == [blank, empty]


def test_prepare_corpus_exit_status_and_message(
    tmp_path: Path, run_tool: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    output = tmp_path / "corpus.jsonl"
    failed = run_tool("data/prepare_corpus", "--input", tmp_path / "none", "--output", output)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: --input ")
    assert failed.stderr.count("\n") == 1
    refused = run_tool("data/prepare_corpus", "--output", output, "--max-megabytes", "0")
    assert refused.returncode == 2
    assert "expected a number above 0, got '0'" in refused.stderr
    assert run_tool("data/prepare_corpus", "--output", output, "--max-megabytes", "0.1").returncode == 0
    assert output.stat().st_size > 50_000


SOURCE = '''\
import sys

@decorated
def first(a):
    """Says
what."""
    def inner():
        return "\\d"
    return inner


if sys:
    class Outer:
        """Docs."""

        async def method(self):
            "One line."
            text = """
at the margin"""
            return text

        def bare(self): return 1

        def only_documented(self):
            """Nothing more."""

class Last: pass
'''


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_corpus_of_functions_has_each_once_with_its_whole_source(tmp_path: Path, prepare_corpus: ModuleType) -> None:
    source, output = write_files(tmp_path / "source", {"a.py": SOURCE.encode(), "b.txt": b"no"}), tmp_path / "out.jsonl"
    prepare_corpus.main(["--documents", "functions", "--input", str(source), "--output", str(output)])
    found = {record["path"]: record["text"] for record in records(output)}
    names = ["first", "Outer.method", "Outer.bare", "Outer.only_documented"]
    assert list(found) == [f"a.py:{name}" for name in names]
    assert found["a.py:first"] == SOURCE[SOURCE.index("@decorated") : SOURCE.index("\n\nif sys")]
    method = 'async def method(self):\n    "One line."\n    text = """\nat the margin"""\n    return text\n'
    assert found["a.py:Outer.method"] == method

    prepare_corpus.main(["--documents", "classes", "--input", str(source), "--output", str(output)])
    assert [record["path"] for record in records(output)] == ["a.py:Last"], "a class inside a statement is left out"


def test_corpus_of_pairs_joined_is_the_functions_source(tmp_path: Path, prepare_corpus: ModuleType) -> None:
    source, output = write_files(tmp_path / "source", {"a.py": SOURCE.encode()}), tmp_path / "out.jsonl"
    prepare_corpus.main(["--documents", "pairs", "--input", str(source), "--output", str(output)])
    first, method = records(output)
    assert first["prompt"] == '@decorated\ndef first(a):\n    """Says\nwhat."""\n'
    assert method["prompt"] == 'async def method(self):\n    "One line."\n'
    assert first["prompt"] + first["answer"] == SOURCE[SOURCE.index("@decorated") : SOURCE.index("\n\nif sys")]
    assert (list(method), method["path"]) == (["prompt", "answer", "path"], "a.py:Outer.method")


def test_corpus_of_functions_refuses_or_counts_other_files(
    tmp_path: Path, prepare_corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_files(tmp_path / "source", {"a.py": b"print 1\n", "b.py": b"def f(): pass\n", "c.py": b"\x00"})
    output = tmp_path / "out.jsonl"
    arguments = ["--documents", "functions", "--input", str(source), "--output", str(output)]
    with pytest.raises(UsageError, match=r"a\.py: expected a source of the running Python"):
        prepare_corpus.main(arguments)
    assert not output.exists()
    prepare_corpus.main([*arguments, "--skip-undecodable"])
    assert [record["path"] for record in records(output)] == ["b.py:f"]
    assert "1 documents, 0.00 MB of text, 2 files skipped that can't be parsed" in capsys.readouterr().out

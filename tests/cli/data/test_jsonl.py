"""Batches hold whole lines; every line that cannot be used is refused with its reason."""

from pathlib import Path

import pytest

from megatron_lancet.data.jsonl import iter_line_batches, iter_texts, parse_line
from megatron_lancet.errors import UsageError


def test_jsonl_batches_cover_the_file_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nbb\n" + b"c" * 50 + b"\n\nlast line without end")
    batches = list(iter_line_batches(path, max_batch_bytes=4))
    assert b"".join(line for batch in batches for line in batch.lines) == path.read_bytes()
    assert sum(batch.num_bytes for batch in batches) == path.stat().st_size
    assert all(line.endswith(b"\n") for batch in batches[:-1] for line in batch.lines)
    assert [batch.first_line_number for batch in batches] == [1, 3, 4]


def test_parse_line_gives_texts_in_the_order_of_the_keys() -> None:
    assert parse_line(b'{"b": "B\\n", "a": "\xc3\xa9", "c": 1}\r\n', ("a", "b"), "here") == ("é", "B\n")
    assert parse_line(b" \t\r\n", ("a",), "here") is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'["a"]', "expected a JSON object, found list"),
        (b'{"body": "a"}', "expected the key 'text', found the keys ['body']"),
        (b'{"text": null}', "expected a string under 'text', found NoneType"),
        (b'{"text": "\xff"}', "found byte 0xff at byte 10 of the line"),
        (b'{"text": "ab\\ud800"}', "lone surrogate at character 2"),
    ],
)
def test_unusable_jsonl_line_is_refused_with_its_reason(line: bytes, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_line(line, ("text",), "corpus.jsonl, line 7")
    assert str(error.value).startswith("corpus.jsonl, line 7: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_iter_texts_skips_blank_lines_but_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": ""}\n  \n{"text": 5}\n')
    texts = iter_texts(path, "text")
    assert [next(texts), next(texts)] == ["a", ""]
    with pytest.raises(UsageError, match=r"corpus\.jsonl, line 5: "):
        next(texts)


def test_missing_jsonl_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=reason):
            list(iter_texts(path, "text"))

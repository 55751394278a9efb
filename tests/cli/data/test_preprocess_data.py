"""Datasets read back as the tokenizer's own encoding, and a failed run leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_lancet.data.encode import TokenizerSettings, build_tokenizer
from megatron_lancet.errors import UsageError

POLL_S = 0.05
PROCESS_TIMEOUT_S = 100


def arguments_for(corpus: Path, prefix: Path, model: Path, *more: str) -> list[str]:
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    return ["--input", str(corpus), "--output-prefix", str(prefix), *tokenizer, *more]


def null_arguments(corpus: Path, prefix: Path, vocab_size: int, *more: str) -> list[str]:
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size)]
    return ["--input", str(corpus), "--output-prefix", str(prefix), *tokenizer, *more]


def write_lines(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def read_documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    num_documents = len(dataset.document_indices) - 1
    assert dataset.document_indices.tolist() == list(range(num_documents + 1)), "one sequence a document"
    return [dataset[index].tolist() for index in range(num_documents)]


def dataset_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("append_eod", [False, True])
def test_dataset_equals_the_tokenizers_own_encoding(
    tmp_path: Path,
    corpus: Path,
    model: Path,
    preprocess_data: ModuleType,
    capsys: pytest.CaptureFixture[str],
    append_eod: bool,
) -> None:
    flags = ["--append-eod"] if append_eod else []
    preprocess_data.main(arguments_for(corpus, tmp_path / "data", model, *flags))
    tokenizer = build_tokenizer(TokenizerSettings("SentencePieceTokenizer", str(model)))
    texts = [json.loads(line)["text"] for line in corpus.read_text("utf-8").split("\n") if line]
    end = [tokenizer.eod] if append_eod else []
    expected = [tokenizer.tokenize(text) + end for text in texts]
    assert read_documents(tmp_path / "data_text_document") == expected
    assert tokenizer.detokenize(expected[0][: -1 if append_eod else None]) == texts[0]
    assert IndexedDataset(str(tmp_path / "data_text_document")).index.dtype is np.uint16
    summary = capsys.readouterr().out
    num_tokens = sum(map(len, expected))
    assert f"data_text_document: {len(texts)} documents, {num_tokens} tokens; " in summary
    assert re.fullmatch(r"[^\n]* \d+\.\d s\n", summary)


def test_dataset_is_the_same_for_any_number_of_workers(
    tmp_path: Path, corpus: Path, model: Path, preprocess_data: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_data, "BATCH_BYTES", 20_000)
    for num_workers in (1, 2):
        prefix = tmp_path / f"workers{num_workers}"
        flags = ["--append-eod", "--workers", str(num_workers)]
        preprocess_data.main(arguments_for(corpus, prefix, model, *flags))
    one, two = (dataset_bytes(tmp_path / f"workers{number}_text_document") for number in (1, 2))
    assert one == two
    assert len(one[0]) > 100_000


def test_dataset_is_written_for_every_key(tmp_path: Path, preprocess_data: ModuleType) -> None:
    corpus = write_lines(
        tmp_path / "corpus.jsonl", '{"a": "1 2", "b": "3"}', '{"b": "4 5", "a": ""}', '{"a": "6", "b": "7"}'
    )
    flags = ["--json-keys", "a", "b", "--append-eod"]
    preprocess_data.main(null_arguments(corpus, tmp_path / "x.y", 100, *flags))
    assert read_documents(tmp_path / "x.y_a_document") == [[1, 2, 99], [6, 99]]
    assert read_documents(tmp_path / "x.y_b_document") == [[3, 99], [4, 5, 99], [7, 99]]
    assert len(list(tmp_path.iterdir())) == 1 + 4


def test_prompt_and_its_answer_are_one_document_with_loss_mask(
    tmp_path: Path, preprocess_data: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_lines(
        tmp_path / "corpus.jsonl", '{"q": "1 2", "a": "3"}', "", '{"a": "4 5 6", "q": ""}', '{"q": "7", "a": "8"}'
    )
    keys = ["--prompt-key", "q", "--answer-key", "a"]
    preprocess_data.main(null_arguments(corpus, tmp_path / "data", 100, *keys))
    assert read_documents(tmp_path / "data_q_a_document") == [[1, 2, 3, 99], [4, 5, 6, 99], [7, 8, 99]]
    assert read_documents(tmp_path / "data_q_a_loss_mask") == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1]]
    assert IndexedDataset(str(tmp_path / "data_q_a_loss_mask")).index.dtype is np.uint8
    assert "data_q_a_document: 3 documents, 11 tokens, 8 of them labels; " in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 1 + 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": "1"}', r"line 2: expected the key 'q', found the keys \['a'\]"),
        ('{"q": "1", "a": ""}', "line 2: expected an answer under 'a', found none that gives a token"),
        ('{"q": "1", "a": null}', "line 2: expected a string under 'a', found NoneType"),
    ],
)
def test_pairs_name_the_first_bad_line_and_leave_nothing(
    tmp_path: Path, preprocess_data: ModuleType, line: str, reason: str
) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", '{"q": "1", "a": "2"}', line)
    keys = ["--prompt-key", "q", "--answer-key", "a"]
    with pytest.raises(UsageError, match=reason):
        preprocess_data.main(null_arguments(corpus, tmp_path / "data", 10, *keys))
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.parametrize(
    "keys",
    [["--prompt-key", "q"], ["--answer-key", "a"], ["--prompt-key", "q", "--answer-key", "a", "--json-keys", "b"]],
)
def test_keys_of_a_pair_belong_together(
    tmp_path: Path, preprocess_data: ModuleType, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        preprocess_data.main(null_arguments(tmp_path / "corpus.jsonl", tmp_path / "data", 10, *keys))
    assert exit_.value.code == 2
    assert "--prompt-key and --answer-key" in capsys.readouterr().err


def test_blank_lines_and_empty_texts_are_left_out(
    tmp_path: Path, preprocess_data: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", '{"text": "1"}', "", '{"text": ""}', " ", '{"text": "2"}')
    preprocess_data.main(null_arguments(corpus, tmp_path / "data", 10, "--append-eod"))
    assert read_documents(tmp_path / "data_text_document") == [[1, 9], [2, 9]]
    assert "2 documents (1 empty texts left out), 4 tokens" in capsys.readouterr().out


def test_dataset_of_a_large_vocabulary_has_wider_ids(tmp_path: Path, preprocess_data: ModuleType) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", '{"text": "65535 65536 99998"}')
    preprocess_data.main(null_arguments(corpus, tmp_path / "data", 100_000, "--append-eod"))
    assert read_documents(tmp_path / "data_text_document") == [[65535, 65536, 99998, 99999]]
    assert IndexedDataset(str(tmp_path / "data_text_document")).index.dtype is np.int32


def test_preprocessing_prints_plain_progress_lines_on_request(
    tmp_path: Path,
    preprocess_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = (f'{{"text": "{number}"}}' for number in range(100, 200))
    corpus = write_lines(tmp_path / "corpus.jsonl", *lines)
    monkeypatch.setattr(preprocess_data, "BATCH_BYTES", 1)
    preprocess_data.main(null_arguments(corpus, tmp_path / "quiet", 300))
    assert "tokenize" not in capfd.readouterr().err, "no bar unless stderr is a terminal"
    preprocess_data.main(null_arguments(corpus, tmp_path / "lines", 300, "--progress", "lines"))
    shown = re.findall(r"^tokenize: (\d+) % of 1600 bytes$", capfd.readouterr().err, flags=re.MULTILINE)
    assert [int(percent) for percent in shown] == list(range(10, 101, 10))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "1"', "expected one JSON object, found invalid JSON"),
        ('"1"', "expected a JSON object, found str"),
        ('{"body": "1"}', "expected the key 'text'"),
        ('{"text": 1}', "expected a string under 'text', found int"),
        (b'{"text": "\xe9"}', "expected UTF-8, found byte 0xe9"),
        ('{"text": "one"}', "the tokenizer refused the text"),
        ('{"text": "1 10"}', "expected token ids from 0 to 9, found 1 to 10"),
        ('{"text": "-1"}', "expected token ids from 0 to 9, found -1 to -1"),
    ],
)
def test_bad_line_is_named_and_the_older_dataset_is_kept(
    tmp_path: Path,
    preprocess_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    line: str | bytes,
    reason: str,
) -> None:
    good = '{"text": "1 2 3"}'
    older = write_lines(tmp_path / "older.jsonl", good)
    preprocess_data.main(null_arguments(older, tmp_path / "data", 10))
    before = dataset_bytes(tmp_path / "data_text_document")
    files = sorted(tmp_path.iterdir())

    monkeypatch.setattr(preprocess_data, "BATCH_BYTES", 1)
    broken = write_lines(tmp_path / "older.jsonl", *[good] * 20, line, *[good] * 5, "also broken")
    with pytest.raises(UsageError) as error:
        preprocess_data.main(null_arguments(broken, tmp_path / "data", 10))
    assert str(error.value).startswith(f"{broken}, line 21: {reason}")
    assert dataset_bytes(tmp_path / "data_text_document") == before
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_preprocessing_refuses_input_without_text(tmp_path: Path, preprocess_data: ModuleType, content: str) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(content)
    with pytest.raises(UsageError, match=r"nothing to write for .*data_text_document"):
        preprocess_data.main(null_arguments(corpus, tmp_path / "data", 10))
    assert list(tmp_path.iterdir()) == [corpus]


def test_preprocessing_refuses_unusable_paths_and_keys(tmp_path: Path, preprocess_data: ModuleType) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", '{"text": "1"}')
    target = tmp_path / "taken_text_document.idx"
    target.mkdir()
    for arguments, reason in (
        (null_arguments(tmp_path / "none", tmp_path / "data", 10), "cannot read input file .*none"),
        (null_arguments(tmp_path, tmp_path / "data", 10), "Is a directory"),
        (null_arguments(corpus, tmp_path / "none" / "data", 10), "output folder .*none does not exist"),
        (null_arguments(corpus, tmp_path / "taken", 10), "taken_text_document.idx is an existing folder"),
        (null_arguments(corpus, tmp_path / "data", 10, "--json-keys", "a", "a"), "names a key twice"),
        (null_arguments(corpus, tmp_path / "data", 10, "--json-keys", "a/b"), "part of a file name"),
    ):
        with pytest.raises(UsageError, match=reason):
            preprocess_data.main(arguments)
    assert sorted(tmp_path.iterdir()) == [corpus, target]


@pytest.fixture
def running_tool(
    tmp_path: Path,
    corpus: Path,
    model: Path,
    tool_command: Callable[..., list[str]],
    tool_environment: dict[str, str],
) -> Iterator["subprocess.Popen[str]"]:
    """A run on two workers, in its own session, that has written a part of its output over an older one."""
    for suffix in ("bin", "idx"):
        (tmp_path / f"data_text_document.{suffix}").write_text("older")
    large = tmp_path / "large.jsonl"
    large.write_bytes(corpus.read_bytes() * 200)  # takes far longer than the test
    process = subprocess.Popen(
        tool_command("data/preprocess_data", *arguments_for(large, tmp_path / "data", model, "--workers", "2")),
        env=tool_environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob(".*.bin.*.tmp")))
        yield process
    finally:
        for pid in session_parents(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PROCESS_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(POLL_S)


def session_parents(session: int) -> dict[int, int]:
    """Parent of every living process of a session; stat reads ``pid (comm) state ppid pgrp session ...``."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _process_group, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # It ended since the folder was listed.
        if int(its_session) == session and state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return parents


def worker_pids(tool_pid: int) -> list[int]:
    """Children of the fork server, which is itself a child of the tool."""
    parents = session_parents(tool_pid)
    return [pid for pid, parent in parents.items() if parents.get(parent) == tool_pid]


def assert_older_dataset_alone_is_left(folder: Path) -> None:
    outputs = [folder / f"data_text_document.{suffix}" for suffix in ("bin", "idx")]
    assert [output.read_text() for output in outputs] == ["older", "older"]
    assert sorted(folder.iterdir()) == [*outputs, folder / "large.jsonl"]


@pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)
def test_interrupted_preprocessing_leaves_only_the_older_dataset(
    tmp_path: Path, running_tool: "subprocess.Popen[str]"
) -> None:
    os.killpg(running_tool.pid, signal.SIGINT)  # as a terminal does
    _, stderr = running_tool.communicate(timeout=PROCESS_TIMEOUT_S)
    assert "ForkServerProcess" not in stderr, "workers must not report the interrupt once more"
    assert running_tool.returncode == -signal.SIGINT
    wait_until(lambda: not session_parents(running_tool.pid))
    assert_older_dataset_alone_is_left(tmp_path)


@pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)
def test_killed_preprocessing_worker_leaves_the_old_dataset(
    tmp_path: Path, running_tool: "subprocess.Popen[str]"
) -> None:
    workers = worker_pids(running_tool.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, stderr = running_tool.communicate(timeout=PROCESS_TIMEOUT_S)
    assert running_tool.returncode == 2
    assert "error: a worker process was killed" in stderr
    assert "Traceback" not in stderr
    wait_until(lambda: not session_parents(running_tool.pid))
    assert_older_dataset_alone_is_left(tmp_path)


@pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)
def test_preprocessing_workers_end_with_a_killed_run(tmp_path: Path, running_tool: "subprocess.Popen[str]") -> None:
    running_tool.kill()
    wait_until(lambda: not session_parents(running_tool.pid))
    assert (tmp_path / "data_text_document.bin").read_text() == "older"


def test_preprocessing_with_two_workers_names_the_first_bad_line(
    tmp_path: Path, run_tool: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    more = "x" * (1 << 18)  # longer than a batch: each of these lines is a task
    long_line = f'{{"text": "1", "more": "{more}"}}'
    corpus = write_lines(tmp_path / "corpus.jsonl", long_line, long_line[:-1], long_line, "also broken")
    completed = run_tool("data/preprocess_data", *null_arguments(corpus, tmp_path / "data", 10, "--workers", "2"))
    assert completed.returncode == 2
    assert completed.stderr.splitlines()[-1].startswith(f"error: {corpus}, line 2: expected one JSON object")
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == [corpus]

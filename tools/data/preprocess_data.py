r"""Tokenizes a JSONL corpus into Megatron's datasets: PREFIX_KEY_document.bin and .idx for every JSON key.

The input has one JSON object per line in UTF-8; blank lines are ignored and texts without a token are skipped. The
output does not depend on the number of workers and is written atomically: a failed run removes what it wrote and keeps
an older dataset with the same prefix.

  lancet data encode --input corpus.jsonl --output-prefix data/corpus --append-eod \
      --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

and then pretrain_gpt_moe.py --data-path data/corpus_text_document, with the same tokenizer. With --tokenizer-type
HuggingFaceTokenizer the model is a folder with tokenizer.json, or a name on the hub, for example Qwen/Qwen3-30B-A3B.

With --prompt-key and --answer-key a line is one document: its prompt, its answer and the end of the document. Which
tokens count as labels (the answer and the end) is in a second dataset, PREFIX_PROMPT_ANSWER_loss_mask.

docs/data.md says more, with examples.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from megatron_lancet.cli.arguments import positive_int, require_output_folder
from megatron_lancet.data.hugging_face import HUGGING_FACE_TYPE, tokenizer_source
from megatron_lancet.data.jsonl import iter_line_batches, open_input
from megatron_lancet.data.parallel import ordered_map, start_fork_server
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_outputs

if TYPE_CHECKING:
    from megatron_lancet.data.encode import EncodedBatch, EncodedDocuments, EncodeJob

BATCH_BYTES = 1 << 18
"""Input per task: large enough to amortise its transfer, small compared with a worker's memory."""

NUM_PROGRESS_LINES = 10


@dataclass(frozen=True)
class Output:
    """Files of one dataset.

    Attributes:
        prefix: as Megatron's ``--data-path`` takes it.
        mask_prefix: of the dataset of its loss mask; None without one.
    """

    prefix: str
    mask_prefix: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All of them, the dataset's first."""
        prefixes = (self.prefix,) if self.mask_prefix is None else (self.prefix, self.mask_prefix)
        return tuple(file for prefix in prefixes for file in dataset_files(prefix))


@dataclass
class DatasetSummary:
    """Counts of the dataset of one key."""

    prefix: str
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_labels: int | None = None

    def count(self, documents: "EncodedDocuments") -> None:
        """Counts the documents of a batch."""
        self.num_documents += len(documents.lengths)
        self.num_tokens += len(documents.tokens)
        self.num_empty += documents.num_empty
        if documents.loss_mask is not None:
            self.num_labels = (self.num_labels or 0) + int(documents.loss_mask.sum())

    def __str__(self) -> str:
        skipped = f" ({self.num_empty} empty texts left out)" if self.num_empty else ""
        labels = "" if self.num_labels is None else f", {self.num_labels} of them labels"
        return f"{self.prefix}: {self.num_documents} documents{skipped}, {self.num_tokens} tokens{labels}"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, which uses Megatron's names."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE.jsonl", help="the corpus, for example of lancet data corpus"
    )
    parser.add_argument("--json-keys", nargs="+", metavar="KEY", help="keys to tokenize (default: text)")
    parser.add_argument("--prompt-key", metavar="KEY", help="key of a prompt, which is no label; with --answer-key")
    parser.add_argument("--answer-key", metavar="KEY", help="key of its answer, the labels; with --prompt-key")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="prefix of the output files, in an existing folder"
    )
    parser.add_argument(
        "--tokenizer-type",
        required=True,
        help="SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, HuggingFaceTokenizer, or"
        " NullTokenizer for texts that are token ids between single spaces",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="MODEL",
        help="the SentencePiece .model; or, of a Hugging Face tokenizer, a folder with tokenizer.json, or a hub name",
    )
    parser.add_argument(
        "--vocab-size", type=positive_int, help="number of ids of NullTokenizer, end-of-document included"
    )
    parser.add_argument(
        "--append-eod",
        action="store_true",
        help="end documents with the end-of-document id, as pairs of prompt and answer always do",
    )
    parser.add_argument("--workers", type=positive_int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--progress",
        choices=("auto", "lines", "off"),
        default="auto",
        help="auto: a bar if stderr is a terminal; lines: ten plain lines on stderr (default: auto)",
    )
    arguments = parser.parse_args(argv)
    if (arguments.prompt_key is None) != (arguments.answer_key is None):
        parser.error("--prompt-key and --answer-key belong together: pass both, or --json-keys")
    if arguments.prompt_key is not None and arguments.json_keys is not None:
        parser.error("give --json-keys, or --prompt-key and --answer-key, not both")
    return arguments


def keys_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the JSON keys that are read.

    Raises:
        UsageError: a key is repeated or can't be part of a file name.
    """
    is_pair = arguments.prompt_key is not None
    keys = [arguments.prompt_key, arguments.answer_key] if is_pair else arguments.json_keys or ["text"]
    flags = "--prompt-key and --answer-key" if is_pair else "--json-keys"
    if len(set(keys)) != len(keys):
        raise UsageError(f"{flags} name{'' if is_pair else 's'} a key twice: {' '.join(keys)}")
    for key in keys:
        if os.sep in key:
            raise UsageError(f"the key {key!r} of {flags} cannot be part of a file name; rename it")
    return keys


def outputs_of(arguments: argparse.Namespace) -> list[Output]:
    """Returns the files of one dataset per key, or of one for prompts with their answers.

    Raises:
        UsageError: a key can't be used, or the folder is not writable.
    """
    keys, has_mask = keys_of(arguments), arguments.prompt_key is not None
    names = ["_".join(keys)] if has_mask else keys
    outputs = []
    for start in (f"{arguments.output_prefix}_{name}" for name in names):
        mask_prefix = f"{start}_loss_mask" if has_mask else None
        outputs.append(Output(f"{start}_document", mask_prefix))
    for output in outputs:
        for target in output.files:
            require_output_folder(target)
    return outputs


def dataset_files(prefix: str) -> tuple[Path, Path]:
    """Returns the two files of a dataset."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def with_progress(batches: Iterable["EncodedBatch"], num_bytes: int, mode: str) -> Iterator["EncodedBatch"]:
    """Yields the batches and shows on stderr how much of the input they cover.

    Args:
        batches: results in order.
        num_bytes: size of the input file.
        mode: ``auto``, ``lines`` or ``off``, as ``--progress``.
    """
    disable = None if mode == "auto" else True  # None: tqdm checks whether stderr is a terminal.
    num_done_bytes = num_lines_shown = 0
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="tokenize", disable=disable) as bar:
        for batch in batches:
            yield batch
            num_done_bytes += batch.num_input_bytes
            bar.update(batch.num_input_bytes)
            num_lines_due = NUM_PROGRESS_LINES * num_done_bytes // num_bytes
            if mode == "lines" and num_lines_due > num_lines_shown:
                num_lines_shown = num_lines_due
                percent = 100 * num_done_bytes // num_bytes
                print(f"tokenize: {percent} % of {num_bytes} bytes", file=sys.stderr, flush=True)


class Writer:
    """Writes one dataset, with its loss mask, to temporary files."""

    def __init__(self, output: Output, files: Sequence[Path], dtype: type, open_files: ExitStack) -> None:
        """
        Args:
            files: temporary files for the files of ``output``.
            dtype: of the tokens.
            open_files: closes them if the run fails.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        def builder(path: Path, dtype: type) -> IndexedDatasetBuilder:
            made = IndexedDatasetBuilder(str(path), dtype=dtype)
            # finalize() closes it too, but a failed run does not get there.
            open_files.callback(made.data_file.close)
            return made

        self.summary = DatasetSummary(output.prefix)
        self._output = output
        self._files = files
        self._tokens = builder(files[0], dtype)
        self._mask = None if output.mask_prefix is None else builder(files[2], np.uint8)

    def add(self, documents: "EncodedDocuments") -> None:
        """Appends the documents of a batch."""
        for tokens, mask in documents.split():
            self._tokens.add_document(tokens, [len(tokens)])
            if self._mask is not None:
                self._mask.add_document(mask, [len(tokens)])
        self.summary.count(documents)

    def finish(self) -> DatasetSummary:
        """Writes the indexes and closes the files.

        Raises:
            UsageError: there is no document.
        """
        if self.summary.num_documents == 0:
            raise UsageError(f"nothing to write for {self._output.prefix}: no text of the input gives a token")
        self._tokens.finalize(str(self._files[1]))
        if self._mask is not None:
            self._mask.finalize(str(self._files[3]))
        return self.summary


def write_datasets(batches: Iterable["EncodedBatch"], outputs: Sequence[Output], dtype: type) -> list[DatasetSummary]:
    """Writes the documents of every batch, one dataset per output.

    Raises:
        UsageError: a dataset would have no document.
    """
    targets = [target for output in outputs for target in output.files]
    with atomic_outputs(*targets) as temporaries, ExitStack() as open_files:
        remaining = iter(temporaries)
        writers = [Writer(output, [next(remaining) for _ in output.files], dtype, open_files) for output in outputs]
        for batch in batches:
            for writer, documents in zip(writers, batch.documents, strict=True):
                writer.add(documents)
        return [writer.finish() for writer in writers]


def make_job(arguments: argparse.Namespace) -> "EncodeJob":
    """Returns the job of every worker."""
    from megatron_lancet.data.encode import EncodeJob, TokenizerSettings

    settings = TokenizerSettings(
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
    )
    joins_pair = arguments.prompt_key is not None
    append_eod = arguments.append_eod or joins_pair
    return EncodeJob(arguments.input, tuple(keys_of(arguments)), settings, append_eod, joins_pair)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    start_s = time.monotonic()
    arguments = parse_arguments(argv)
    outputs = outputs_of(arguments)
    with open_input(arguments.input) as file:
        num_bytes = os.fstat(file.fileno()).st_size
    preload_modules = ["megatron_lancet.data.encode"]
    if arguments.tokenizer_type == HUGGING_FACE_TYPE:
        tokenizer_source(arguments.tokenizer_model)
        preload_modules.append("megatron.core.tokenizers.text.libraries")
    # Megatron takes seconds to import, so the checks above report a typing error first.
    if arguments.workers > 1:
        start_fork_server(preload_modules)
    from megatron_lancet.data import encode

    job = make_job(arguments)
    dtype = encode.token_dtype(encode.build_tokenizer(job.settings))
    results = ordered_map(
        partial(encode.encode_batch, job),
        iter_line_batches(arguments.input, BATCH_BYTES),
        arguments.workers,
    )
    with closing(results):
        summaries = write_datasets(with_progress(results, num_bytes, arguments.progress), outputs, dtype)
    seconds = time.monotonic() - start_s
    print(f"{'; '.join(map(str, summaries))}; {seconds:.1f} s")


if __name__ == "__main__":
    run_command(main)

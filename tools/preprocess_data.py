r"""Tokenizes a JSONL corpus into Megatron's datasets: PREFIX_KEY_document.bin and .idx for every JSON key.

The input has one JSON object per line in UTF-8; blank lines are ignored and texts without a token are skipped. The
output does not depend on the number of workers and is written atomically: a failed run removes what it wrote and keeps
an older dataset with the same prefix.

  tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \
      --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

and then pretrain_gpt_moe.py --data-path data/corpus_text_document, with the same tokenizer.
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

from tqdm import tqdm

from megatron_lancet.cli.arguments import positive_int, require_output_folder
from megatron_lancet.data.jsonl import iter_line_batches, open_input
from megatron_lancet.data.parallel import ordered_map, start_fork_server
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files import atomic_outputs

if TYPE_CHECKING:
    from megatron_lancet.data.encode import EncodedBatch, EncodeJob

BATCH_BYTES = 1 << 18
"""Input per task: large enough to amortise its transfer, small compared with a worker's memory."""

NUM_PROGRESS_LINES = 10


@dataclass
class DatasetSummary:
    """Counts of the dataset of one key."""

    prefix: str
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0

    def __str__(self) -> str:
        skipped = f" ({self.num_empty} empty texts left out)" if self.num_empty else ""
        return f"{self.prefix}: {self.num_documents} documents{skipped}, {self.num_tokens} tokens"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, which uses Megatron's names."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE.jsonl", help="the corpus, for example from prepare_corpus.py"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize (default: text)"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="prefix of the output files, in an existing folder"
    )
    parser.add_argument(
        "--tokenizer-type",
        required=True,
        help="SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer, or NullTokenizer for texts"
        " that are token ids between single spaces",
    )
    parser.add_argument("--tokenizer-model", metavar="FILE.model", help="the SentencePiece model")
    parser.add_argument(
        "--vocab-size", type=positive_int, help="number of ids of NullTokenizer, end-of-document included"
    )
    parser.add_argument("--append-eod", action="store_true", help="end documents with the end-of-document id")
    parser.add_argument("--workers", type=positive_int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--progress",
        choices=("auto", "lines", "off"),
        default="auto",
        help="auto: a bar if stderr is a terminal; lines: ten plain lines on stderr (default: auto)",
    )
    return parser.parse_args(argv)


def dataset_prefixes(output_prefix: str, keys: Sequence[str]) -> list[str]:
    """Returns one dataset prefix per key, as Megatron's ``--data-path`` takes it.

    Raises:
        UsageError: a key is repeated or can't be part of a file name, or the folder is not writable.
    """
    if len(set(keys)) != len(keys):
        raise UsageError(f"--json-keys names a key twice: {' '.join(keys)}")
    for key in keys:
        if os.sep in key:
            raise UsageError(f"the key {key!r} of --json-keys cannot be part of a file name; rename it")
    prefixes = [f"{output_prefix}_{key}_document" for key in keys]
    for prefix in prefixes:
        for target in dataset_files(prefix):
            require_output_folder(target)
    return prefixes


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


def write_datasets(
    batches: Iterable["EncodedBatch"],
    prefixes: Sequence[str],
    dtype: type,
) -> list[DatasetSummary]:
    """Writes the documents of every batch, one dataset per prefix.

    Raises:
        UsageError: a dataset would have no document.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    summaries = [DatasetSummary(prefix) for prefix in prefixes]
    targets = [target for prefix in prefixes for target in dataset_files(prefix)]
    with atomic_outputs(*targets) as temporaries, ExitStack() as open_files:
        bin_paths, idx_paths = temporaries[0::2], temporaries[1::2]
        builders = [IndexedDatasetBuilder(str(path), dtype=dtype) for path in bin_paths]
        for builder in builders:
            open_files.callback(
                builder.data_file.close
            )  # finalize() closes it too, but a failed run does not get there
        for batch in batches:
            for builder, summary, documents in zip(builders, summaries, batch.documents, strict=True):
                for tokens in documents.split():
                    builder.add_document(tokens, [len(tokens)])
                summary.num_documents += len(documents.lengths)
                summary.num_tokens += len(documents.tokens)
                summary.num_empty += documents.num_empty
        for builder, summary, idx_path in zip(builders, summaries, idx_paths, strict=True):
            if summary.num_documents == 0:
                raise UsageError(f"nothing to write for {summary.prefix}: no text of the input gives a token")
            builder.finalize(str(idx_path))
    return summaries


def make_job(arguments: argparse.Namespace) -> "EncodeJob":
    """Returns the job of every worker."""
    from megatron_lancet.data.encode import EncodeJob, TokenizerSettings

    settings = TokenizerSettings(
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        vocab_size=arguments.vocab_size,
    )
    return EncodeJob(arguments.input, tuple(arguments.json_keys), settings, arguments.append_eod)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    start_s = time.monotonic()
    arguments = parse_arguments(argv)
    prefixes = dataset_prefixes(arguments.output_prefix, arguments.json_keys)
    with open_input(arguments.input) as file:
        num_bytes = os.fstat(file.fileno()).st_size
    # Megatron takes seconds to import, so the checks above report a typing error first.
    if arguments.workers > 1:
        start_fork_server(preload_modules=["megatron_lancet.data.encode"])
    from megatron_lancet.data import encode

    job = make_job(arguments)
    dtype = encode.token_dtype(encode.build_tokenizer(job.settings))
    results = ordered_map(
        partial(encode.encode_batch, job),
        iter_line_batches(arguments.input, BATCH_BYTES),
        arguments.workers,
    )
    with closing(results):
        summaries = write_datasets(with_progress(results, num_bytes, arguments.progress), prefixes, dtype)
    seconds = time.monotonic() - start_s
    print(f"{'; '.join(map(str, summaries))}; {seconds:.1f} s")


if __name__ == "__main__":
    run_command(main)

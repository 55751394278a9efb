"""Makes the data sets of the benchmark by the project's own tools."""

from collections.abc import Collection
from pathlib import Path

from benchmarks.bins.cases import CORPUS_MEGABYTES, VOCAB
from benchmarks.demo.data import run_tool


def prepare(folder: Path, kinds: Collection[str]) -> None:
    """Writes a tokenizer, and the data set KIND_text_document of each kind, to a new folder.

    Args:
        kinds: values of ``lancet data corpus --documents``.

    Raises:
        UsageError: a tool failed.
    """
    folder.mkdir()
    log, model = folder / "log", folder / "tokenizer"
    run_tool(log, "data/prepare_corpus", "--output", folder / "corpus.jsonl", "--max-megabytes", CORPUS_MEGABYTES)
    vocab = ("--vocab-size", VOCAB, "--sample-megabytes", CORPUS_MEGABYTES)
    run_tool(log, "data/train_tokenizer", "--input", folder / "corpus.jsonl", "--output-prefix", model, *vocab)
    for kind in kinds:
        corpus = folder / f"{kind}.jsonl"
        run_tool(log, "data/prepare_corpus", "--documents", kind, "--output", corpus)
        tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model.with_suffix(".model"))
        options = ("--append-eod", "--progress", "off")
        run_tool(log, "data/preprocess_data", "--input", corpus, "--output-prefix", folder / kind, *tokenizer, *options)

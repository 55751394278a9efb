"""Trains a SentencePiece BPE model for Megatron's ``--tokenizer-type SentencePieceTokenizer`` on JSONL.

Text survives ``decode(encode(text))`` unchanged: newlines, tabs, runs of spaces, any Unicode. The one
exception is U+2581, which SentencePiece itself uses for the space and decodes to a space.

  lancet data tokenizer --input corpus.jsonl --output-prefix tokenizer --vocab-size 32000
"""

import argparse
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import sentencepiece

from megatron_lancet.cli.arguments import positive_float, positive_int, require_output_folder
from megatron_lancet.data.jsonl import iter_texts, open_input
from megatron_lancet.errors import UsageError, run_command
from megatron_lancet.files.atomic import atomic_write

BYTES_PER_MEGABYTE = 1_000_000

UNK_ID, BOS_ID, EOS_ID, PAD_ID = range(4)
"""Megatron uses eos as end-of-document. A separate pad id lets it mask padding without masking text."""

USER_DEFINED_SYMBOLS = ["\n", "\t"]
"""One token each: the trainer uses both characters itself, so it cannot learn them."""

SPACE_SYMBOL = "\u2581"
BASIC_CHARACTERS = SPACE_SYMBOL + "".join(map(chr, range(0x21, 0x7F)))
"""Space and printable ASCII always get a piece, however rare they are: as bytes they could not be part of a longer
piece, and a space would decode to U+2581."""

CHARACTER_COVERAGE = 0.9995
"""Share of the corpus whose characters get a piece; the rarest characters are spelled in bytes."""

MAX_SENTENCE_CHARACTERS = 4096
"""Longer lines are cut, because the trainer drops what exceeds its limit, and its time grows with the length."""

MAX_UTF8_BYTES_PER_CHARACTER = 4


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", type=Path, required=True, help="JSONL; blank lines are ignored")
    parser.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX.model")
    parser.add_argument("--vocab-size", type=positive_int, required=True, metavar="N", help="number of pieces")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text (default: text)")
    parser.add_argument(
        "--sample-megabytes",
        type=positive_float,
        default=64.0,
        metavar="N",
        help="from a larger file, use only every k-th line of text, k = ceil(file size / N million bytes)"
        " (default: %(default)g)",
    )
    return parser.parse_args(argv)


def iter_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the texts; no piece can span two of them."""
    for text in texts:
        # Not splitlines(): only "\n" has its own piece, and other separators are characters to learn.
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_SENTENCE_CHARACTERS):
                yield line[start : start + MAX_SENTENCE_CHARACTERS]


def sample_sentences(path: Path, key: str, max_bytes: float) -> list[str]:
    """Returns every k-th line of text of a corpus; two runs get the same sample.

    Raises:
        UsageError: the file can't be used, or has no text.
    """
    with open_input(path) as file:
        num_file_bytes = file.seek(0, io.SEEK_END)
    stride = max(1, int(-(-num_file_bytes // max_bytes)))
    sentences = list(islice(iter_sentences(iter_texts(path, key)), 0, None, stride))
    if not sentences:
        raise UsageError(f"{path} has no text to learn from; expected a text under {key!r} on some line")
    return sentences


def required_characters(sentences: Iterable[str]) -> str:
    """Returns ``BASIC_CHARACTERS`` without the corpus's most frequent character, for ``required_chars``.

    SentencePiece 0.2 adds the required characters first but stops, even among them, as soon as those so far cover
    ``CHARACTER_COVERAGE`` of the corpus. Without the most frequent one, which gets its piece anyway, they cannot.
    """
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(sentence)
    most_frequent = max(counts, key=lambda character: counts[character], default="")
    return BASIC_CHARACTERS.replace(SPACE_SYMBOL if most_frequent == " " else most_frequent, "")


def train_model(sentences: Sequence[str], vocab_size: int) -> bytes:
    """Returns the serialized model.

    Raises:
        UsageError: the vocabulary is larger than the sentences can fill, or too small for the fixed pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # An iterator and a writer, because paths would be stored in the model.
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
            # Exact text: nothing is normalized, added or dropped, and characters without a piece become bytes.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            byte_fallback=True,
            character_coverage=CHARACTER_COVERAGE,
            required_chars=required_characters(sentences),
            user_defined_symbols=USER_DEFINED_SYMBOLS,
            # Code: an indentation is one piece, words do not span spaces, numbers go digit by digit.
            allow_whitespace_only_pieces=True,
            split_by_whitespace=True,
            split_by_unicode_script=True,
            split_digits=True,
            max_sentence_length=MAX_SENTENCE_CHARACTERS * MAX_UTF8_BYTES_PER_CHARACTER,
            # Stored in the model, so it must not depend on the machine.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UsageError(describe_training_error(str(error), vocab_size)) from error
    return model.getvalue()


def describe_training_error(message: str, vocab_size: int) -> str:
    """Returns a message for users about an error of SentencePiece 0.2."""
    if match := re.search(r"Vocabulary size too high .* <= (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too large for this corpus: the largest possible is"
            f" {match[1]}; choose a smaller one or use more text"
        )
    if match := re.search(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too small: bytes, special pieces and the characters of this"
            f" corpus alone need {match[1]}"
        )
    return f"SentencePiece could not train a model with --vocab-size {vocab_size}: {message}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    output = Path(f"{arguments.output_prefix}.model")
    require_output_folder(output)
    max_bytes = arguments.sample_megabytes * BYTES_PER_MEGABYTE
    sentences = sample_sentences(arguments.input, arguments.json_key, max_bytes)
    model = train_model(sentences, arguments.vocab_size)
    atomic_write(output, model)
    print(f"{output}: {arguments.vocab_size} pieces learned from {len(sentences)} lines of text")


if __name__ == "__main__":
    run_command(main)

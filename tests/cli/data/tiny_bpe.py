"""A tiny byte-level BPE tokenizer, as Hugging Face's folders hold one."""

import json
from pathlib import Path

END = "<|endoftext|>"
BEGIN = "<|begin|>"
VOCAB_SIZE = 600


def write_tokenizer(folder: Path, texts: list[str], **config: str) -> Path:
    """Train a tokenizer and write its ``tokenizer.json``, and its ``tokenizer_config.json`` of ``config``, if any.

    Its template puts :data:`BEGIN` before every text, and its file asks for at most 8 tokens: encoding for a data set
    must do neither.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    tokenizer.enable_truncation(8)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder

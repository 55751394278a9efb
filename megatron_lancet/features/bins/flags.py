"""The flags of bins."""

from dataclasses import dataclass

from megatron_lancet.flags import CheckedFlags, flag


@dataclass(frozen=True)
class BinsFlags(CheckedFlags):
    """Whether and how documents of different lengths are dealt to micro-batches."""

    pack_documents: bool = flag(
        False,
        parsed_as=bool,
        unchecked="how documents are dealt to micro-batches",
        help="make each document a sample of its own length, and pack the samples of a step into the micro-batches of "
        "all ranks, so that concurrent micro-batches take equally long. Default: Megatron's samples, all of "
        "--seq-length.",
    )
    pack_max_tokens: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        unchecked="",
        metavar="N",
        advice="Without the flag it is --seq-length.",
        help="with --lancet-pack-documents, most tokens of a micro-batch, unless the samples of a step do not fit. "
        "Default: --seq-length.",
    )
    pack_attention_cost: float | None = flag(
        None,
        parsed_as=float,
        at_least=0,
        unchecked="",
        metavar="RATIO",
        advice="0: attention costs nothing.",
        help="with --lancet-pack-documents, time of one query-key pair over the time of a token without attention. "
        "Default: from the FLOP of the model's sizes.",
    )

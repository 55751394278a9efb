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
        help="each document is a sample of its own length. The samples of a step are dealt to the micro-batches of all "
        "ranks, so that micro-batches that run at the same time take equally long, and packed. Default: Megatron's "
        "samples, all of --seq-length.",
    )
    pack_max_tokens: int | None = flag(
        None,
        parsed_as=int,
        at_least=1,
        unchecked="",
        metavar="N",
        advice="Without the flag it is --seq-length.",
        help="with --lancet-pack-documents, most tokens of a micro-batch; more only where the samples of a step do not "
        "fit. Default: --seq-length.",
    )
    pack_attention_cost: float | None = flag(
        None,
        parsed_as=float,
        at_least=0,
        unchecked="",
        metavar="RATIO",
        advice="0: attention costs nothing beside the rest.",
        help="with --lancet-pack-documents, time of a position's attention to one other, in units of all other time "
        "of a token. Default: from the operations of the model's sizes.",
    )

"""The flags."""

from dataclasses import dataclass

from megatron_lancet.errors import UsageError
from megatron_lancet.flags import CheckedFlags, flag

FROM = "--lancet-from-hf"
SAVE = "--lancet-save-hf"
_BUILDER = ": the weights go through its model builder."


def _folder(name: str) -> str:
    if not name:
        raise UsageError(f'{FROM} and {SAVE} expect a folder, got "". Name a folder, or drop the flag.')
    return name


@dataclass(frozen=True)
class HuggingFaceFlags(CheckedFlags):
    """Folders in Hugging Face format."""

    from_hf: str | None = flag(
        None,
        read=_folder,
        metavar="DIR",
        same_on_all_ranks=True,
        not_with_spec=_BUILDER,
        unmodelled="weights don't change a step's time: pass the model's arguments in place of it",
        help="start from the weights in a Hugging Face folder. The arguments that define the model come from its "
        "config.json, and so does the tokenizer unless --tokenizer-type is given.",
    )
    save_hf: str | None = flag(
        None,
        read=_folder,
        metavar="DIR",
        same_on_all_ranks=True,
        not_with_spec=_BUILDER,
        unchecked="",
        help="write the model as a Hugging Face folder, DIR/iter_0000100, beside each checkpoint and at the end of the "
        "training. Needs --lancet-from-hf, whose configuration and tokenizer are copied.",
    )

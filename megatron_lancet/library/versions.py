"""The versions of Megatron in which other launchers can use the overlap; ``pretrain_gpt_moe.py`` needs a newer one."""

from packaging.specifiers import SpecifierSet

from megatron_lancet.training.megatron.seams import check_seams
from megatron_lancet.training.megatron.versions import REQUIRED, check_versions

MEGATRON = SpecifierSet(">=0.18,<0.20")
_OF_OWN_LOOP = {
    "megatron.core.utils.get_batch_on_this_cp_rank(use_per_sequence_balancing)",
    "megatron.core.packed_seq_params.PackedSeqParams(tokens_per_sample)",
    "megatron.core.datasets.gpt_dataset.GPTDatasetConfig(inter_document_masking)",
    "the place in checkpointing.save_checkpoint that writes the tracker file",
}
"""Used by our data sets, batches and checkpoints alone, which another launcher has its own of."""


def check_megatron() -> None:
    """
    Raises:
        UsageError: a package is missing, has a version that is not supported, or lacks something that is used.
    """
    check_versions({**REQUIRED, "megatron-core": MEGATRON})
    check_seams(but=_OF_OWN_LOOP)

"""Megatron versions that the library supports; ``pretrain_gpt_moe.py`` needs 0.19."""

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
"""Only our data sets, batches and checkpoints use these; another launcher has its own."""


def check_megatron() -> None:
    """
    Raises:
        UsageError: a package is missing, has a version that is not supported, or lacks something that is used.
    """
    check_versions({**REQUIRED, "megatron-core": MEGATRON})
    check_seams(but=_OF_OWN_LOOP)

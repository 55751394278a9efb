"""Layers of Transformer Engine in a run, ``--transformer-impl transformer_engine`` of Megatron."""

from megatron_lancet.feature import Feature, RunFacts
from megatron_lancet.feature_parts import SmallLaunch
from megatron_lancet.features.te.seams import check_te_seams
from megatron_lancet.training.plan.support import TRANSFORMER_ENGINE

_KERNELS = "Transformer Engine's kernels"
_GROUPED = "--moe-grouped-gemm --use-grouped-gemm"
_BESIDE_LAYERS = (
    "--moe-permute-fusion --use-transformer-engine-op-fuser --cross-entropy --tp-comm --attention-backend "
    "--flash-attention-version --moe-router-fusion --use-te --qk-clip --window --deterministic-mode --batch-invariant "
    "--moe-single-grouped --fused-residual --mla-down-proj-fusion --no-tp-comm --symmetric-ar-type --moe-mlp-glu "
    "--cp-comm-type --softmax-type"
)
"""Beginnings of the flags of its kernels that a check leaves out where its layers stay, too."""


class TransformerEngineFeature(Feature):
    """Modules of Transformer Engine."""

    name = "te"

    def check(self, facts: RunFacts) -> None:
        """Checks the installed version where a plan runs its layers."""
        is_used = facts.plan is not None and facts.args.transformer_impl == TRANSFORMER_ENGINE
        if is_used and not facts.is_dry_run:
            check_te_seams()

    def shrink(self, launch: SmallLaunch) -> None:
        """Replaces its layers, where they need a GPU or stock gets a mask."""
        is_used = launch.args.transformer_impl == TRANSFORMER_ENGINE
        keeps = is_used and launch.keeps_kernels and not launch.stock_mask
        launch.left_out[_KERNELS] = _BESIDE_LAYERS if keeps else f"{_GROUPED} {_BESIDE_LAYERS}"
        if keeps:
            launch.flags += ["--transformer-impl", TRANSFORMER_ENGINE]
        if is_used and not keeps:
            why = "because stock gets a mask of documents" if launch.keeps_kernels else "which need a GPU"
            launch.changes.append(f"local layers in place of Transformer Engine's, {why}")


TRANSFORMER_ENGINE_LAYERS = TransformerEngineFeature()

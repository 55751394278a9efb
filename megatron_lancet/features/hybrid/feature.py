"""Hybrid models in a run, ``--hybrid-layer-pattern`` of Megatron."""

import argparse
from collections.abc import Iterator

from megatron_lancet.feature import Feature


class HybridFeature(Feature):
    """Models of attention, MoE and MLP layers in any order."""

    name = "hybrid"

    def layout_blockers(self, args: argparse.Namespace) -> Iterator[str]:
        """Yields the pattern: a check builds a GPT."""
        if args.hybrid_layer_pattern:
            yield "--hybrid-layer-pattern"


HYBRID = HybridFeature()

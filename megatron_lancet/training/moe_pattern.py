"""Which layers of the model are MoE layers."""

import argparse

from megatron_lancet.errors import UsageError


def moe_pattern(args: argparse.Namespace) -> list[bool]:
    """Whether each layer of the model is a MoE layer.

    Raises:
        UsageError: the pattern of ``--moe-layer-freq`` has another length than the model.
    """
    if not args.num_experts:
        return [False] * args.num_layers
    freq = args.moe_layer_freq
    pattern = freq if isinstance(freq, list) else [layer % freq == 0 for layer in range(args.num_layers)]
    if len(pattern) != args.num_layers:
        raise UsageError(
            f"--moe-layer-freq is a pattern of {len(pattern)} layers, --num-layers is {args.num_layers}. Change one of "
            "them."
        )
    return [bool(is_moe) for is_moe in pattern]

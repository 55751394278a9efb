"""LocMoE's loss, which draws tokens to the experts of their own node."""

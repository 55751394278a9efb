"""The local experts of a rank that Megatron builds without Transformer Engine, run layer by layer."""

"""Training in Megatron-Bridge's loop and in Megatron's own, with and without a plan."""

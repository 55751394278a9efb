"""The overlap for programs that build and train a Megatron-Core model themselves: ``megatron_lancet.Overlap``."""

"""The only place that patches Megatron."""

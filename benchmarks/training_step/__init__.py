"""One training step of a Megatron GPT-MoE, ready to be timed, under any of the schedules that are compared."""

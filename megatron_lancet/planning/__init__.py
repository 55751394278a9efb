"""Makes plans from measured profiles: simulation, search, explanation and what-if; without torch and Megatron."""

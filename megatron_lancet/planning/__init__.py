"""From a measured profile to a plan: simulation, search, explanation and what-if; no torch, no Megatron."""

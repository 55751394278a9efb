"""MoE layers whose routed sum is added one layer later."""

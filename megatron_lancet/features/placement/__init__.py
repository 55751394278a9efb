"""Experts on other ranks than Megatron's, by a file."""

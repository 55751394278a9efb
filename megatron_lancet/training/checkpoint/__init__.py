"""Checkpoints: complete ones, how they are loaded, saved, read and resized."""

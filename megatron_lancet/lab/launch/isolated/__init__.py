"""Runs a launch script in isolation: no network, no writes, no training."""

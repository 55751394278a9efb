"""Runs a launch script without what it could change: no network, no writes, no training."""

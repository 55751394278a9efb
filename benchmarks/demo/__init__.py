"""Trains a small model."""

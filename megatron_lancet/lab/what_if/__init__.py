"""Predicts step times in clusters, layouts and routings other than the measured ones."""

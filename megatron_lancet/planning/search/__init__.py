"""Finds the fastest plan for a profile."""

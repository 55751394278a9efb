"""Finds a plan while training: profile, plan, switch, verify."""

"""Executes a plan: transports, all-to-alls, deferred weight gradients, counters."""

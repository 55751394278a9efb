"""Executes a plan: transports, all-to-alls that are issued and waited for, deferred weight gradients, counters."""

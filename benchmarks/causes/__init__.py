"""Causes of waits that are known because they were injected, on a shaped link."""

"""Profiles and predictions from torch.profiler's traces of a stock run, against the profiler's own and real steps."""

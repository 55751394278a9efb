"""Multiprocessors of all-to-alls: how many they take, and how many concurrent kernels leave."""

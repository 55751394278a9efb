"""What the benchmarks on the shaped network share: the network, the ranks, the turns of variants and the tables."""

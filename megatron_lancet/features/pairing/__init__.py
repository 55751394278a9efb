"""Pairing: the backward of each micro-batch is paired with the forward of the next."""

"""Transports for all-to-alls: the contract and one module per backend."""

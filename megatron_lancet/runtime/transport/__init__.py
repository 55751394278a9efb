"""How all-to-alls travel: the contract and one module per backend."""

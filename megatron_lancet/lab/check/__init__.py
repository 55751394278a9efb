"""``lancet check``: compares a shrunk launch with one rank, and the overlap with stock, gradient by gradient."""

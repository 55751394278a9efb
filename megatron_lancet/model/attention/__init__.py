"""Self-attention of a chunk, over the positions of earlier chunks and of other ranks."""

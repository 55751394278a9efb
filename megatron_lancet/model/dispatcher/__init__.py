"""How a chunk's tokens reach the ranks of their experts and come back."""

"""What rows in tiles do not work with."""

"""Hidden states in a narrower format in messages."""

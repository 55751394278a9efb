"""Which plan a run starts with, from its flags or a file, and what it refuses."""

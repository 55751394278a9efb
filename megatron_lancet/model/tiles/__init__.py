"""The rows of a chunk in parts: those that stay on their rank, and tiles of those that go to other ranks."""

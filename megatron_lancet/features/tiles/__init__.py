"""The rows of a chunk in parts: rows that stay on their rank, and tiles of rows that go to other ranks."""

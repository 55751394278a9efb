"""What a run achieved: text and JSON."""

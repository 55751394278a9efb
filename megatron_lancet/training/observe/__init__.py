"""What a run records about its steps and reports."""

"""What the parts of the check share."""

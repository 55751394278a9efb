"""What several command-line tools share."""

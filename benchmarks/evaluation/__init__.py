"""What replicas of popular experts buy when a skewed text is evaluated on a shaped network."""

"""Records of a run's steps, and its report."""

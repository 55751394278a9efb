"""What would overlap bring to a launch script? An answer without a profile, a GPU or a cluster, as ranges."""

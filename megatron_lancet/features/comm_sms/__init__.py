"""A bound on the multiprocessors that all-to-alls take."""

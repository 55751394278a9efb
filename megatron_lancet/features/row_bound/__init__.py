"""A bound on the rows of a chunk that a rank's experts work on at a time."""

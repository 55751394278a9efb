"""A bound on the rows that the experts of a rank work on at a time."""

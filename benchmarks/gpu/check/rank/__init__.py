"""One rank of the check with several: a process of its own, which saves its results as it goes."""

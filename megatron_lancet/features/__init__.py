"""Optional parts of a run, a folder each: the core names none of them but in ``registry.py``."""

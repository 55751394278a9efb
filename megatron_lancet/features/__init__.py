"""Optional parts of a run, a folder each; only the registry names them."""

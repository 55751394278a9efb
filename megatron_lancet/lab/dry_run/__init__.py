"""``--lancet-dry-run``: parses, validates and explains a launch script without training."""

"""``--lancet-dry-run``: everything that a launch script says is parsed, validated and explained; nothing is trained."""

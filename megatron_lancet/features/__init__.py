"""Optional features, a folder each: ``registry.py`` alone names them."""

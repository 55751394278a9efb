"""Tables of the documents that are made from committed results."""

"""Tables in the documents, generated from committed results."""

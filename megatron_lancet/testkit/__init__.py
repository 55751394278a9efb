"""One process as one rank of many, and a GPU without a GPU."""

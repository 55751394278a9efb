"""Documents of the standard library in bins: what dealing them over all ranks buys on a shaped network."""

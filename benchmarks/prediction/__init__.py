"""How far a predicted step is from the real one: predicted from a profile, then run on a shaped network."""

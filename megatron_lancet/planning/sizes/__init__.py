"""What the layers of a model save and cost, from its sizes alone."""

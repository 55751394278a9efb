"""A chunk's way through the model, in data order: chunking, route, dispatch, experts, combine, next layer."""

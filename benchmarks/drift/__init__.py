"""A training whose topic changes: what rebalancing brings against a placement at the start and against none."""

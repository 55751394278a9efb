"""A mocked expert-parallel world of N ranks in one process, for tests and experiments on one device."""

"""An expert-parallel world of N ranks that one process plays, for tests and for trying things on one device."""

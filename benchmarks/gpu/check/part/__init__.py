"""The parts of the check: modules with ``run(record, place)``, and what they share."""

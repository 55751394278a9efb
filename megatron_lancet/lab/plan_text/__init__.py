"""Output of the planner's tools."""

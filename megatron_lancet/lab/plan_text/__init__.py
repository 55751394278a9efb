"""What the planner's tools print and draw."""

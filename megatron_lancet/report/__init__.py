"""Reports, plans and timelines as text, JSON, pictures and pages."""

"""From measured spans to the figures of a profile, whoever measured them: the profiler, or somebody else's trace."""

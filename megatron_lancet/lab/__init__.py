"""Tools for engineers, next to a training job: dry run, check, traces, what-if, causes, modelled step, views."""

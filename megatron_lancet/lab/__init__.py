"""Tools for engineers, beside a training job: dry run, check, traces, what-if, causes, modelled step, views."""

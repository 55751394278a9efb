"""Places that order kernels or keep memory but can be deleted without harm."""

_TIMES = "It times a measurement of the profiler. The tensors are its own, and no result depends on the event."
_STEP_TIMES = "It times a training step for the report. No tensor depends on it."
_GLOO = "This transport is for gloo, whose collectives complete on the host. CUDA has another."

NEEDLESS: dict[tuple[str, str, str], str] = {
    ("profiler/links.py", "_between_ms", "end.synchronize()"): _TIMES,
    ("profiler/slowdown.py", "timed_ms", "pair.end.record()"): _TIMES,
    ("profiler/slowdown.py", "timed_ms", "pair.end.synchronize()"): _TIMES,
    (
        "features/placement/rebalance.py",
        "Rebalancer._rebalance",
        "torch.cuda.synchronize()",
    ): "It times the moves of experts between two steps. Whoever uses a moved weight is behind its message already.",
    ("training/observe/step_recorder.py", "StepRecorder._timed", "pair.end.record()"): _STEP_TIMES,
    ("training/observe/step_recorder.py", "StepRecorder._read", "duration.end.synchronize()"): _STEP_TIMES,
    ("runtime/transport/works.py", "WorksTransfer.__init__", "self._buffers = ..."): _GLOO,
    ("runtime/transport/works.py", "WorksTransfer.wait", "work.wait()"): _GLOO,
    (
        "runtime/trace.py",
        "Trace.begin_step",
        "torch.cuda.synchronize()  # makes the clocks of host and stream agree about the beginning",
    ): "It sets the zero of the trace's times. What the step computes does not depend on it.",
    (
        "features/comm_priority/grad_reduction.py",
        "_ReduceScatter.__init__",
        "self._sent = ...",
    ): "Parts that lie side by side are then copied like others before they are sent: slower, with the same result. "
    "The memory is DDP's buffer, which lives as long as the model.",
}
"""The reason why a place can be deleted, by file in the package, outermost function and first line."""

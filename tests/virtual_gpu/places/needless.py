"""Places that order kernels or keep memory but can be deleted without harm."""

_TIMES = "It times a measurement of the profiler. The tensors are its own, and no result depends on the event."
_STEP_TIMES = "It times a training step for the report. No tensor depends on it."
_GLOO = "This transport is for gloo, whose collectives complete on the host. CUDA has another."

_STATS = "It times a wait for the report. No tensor depends on the event, and no stream waits for it."
_CALLBACKS = (
    "Only gloo's transport launches in callbacks: this has no effect on CUDA. The cases run the transport for NCCL; "
    "ranks with gloo are tested in processes of their own."
)

NEEDLESS: dict[tuple[str, ...], str] = {
    ("profiler/links.py", "_between_ms", "end.synchronize()"): _TIMES,
    ("profiler/slowdown.py", "timed_ms", "pair.end.record()"): _TIMES,
    ("profiler/slowdown.py", "timed_ms", "pair.end.synchronize()"): _TIMES,
    ("training/observe/step_recorder.py", "StepRecorder._timed", "pair.end.record()"): _STEP_TIMES,
    ("training/observe/step_recorder.py", "StepRecorder._read", "duration.end.synchronize()"): _STEP_TIMES,
    ("runtime/transport/works.py", "WorksTransfer.__init__", "self._buffers = ..."): _GLOO,
    ("runtime/transport/works.py", "WorksTransfer.wait", "work.wait()"): _GLOO,
    (
        "runtime/weight_grad_store.py",
        "DeferredWeight.report",
        "parameter.grad.record_stream(self.ddp_stream)",
    ): "Only Transformer Engine's biases have such a gradient, and the cases here run without it: case te/bias/k=2 of "
    "virtual_gpu/test_cases needs it.",
    (
        "runtime/weight_grad_store.py",
        "WeightGradStore.flush",
        "torch.cuda.current_stream().wait_stream(stream)",
    ): "It is for the same biases: case te/bias/no-overlap-grad-reduce of virtual_gpu/test_cases needs it.",
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
    ("runtime/comm_stats.py", "CommStats._on_device", "pair.end.record()", "recorded before the line above"): _STATS,
    (
        "runtime/comm_stats.py",
        "CommStats._on_device",
        "pair.end.record()",
        "on another stream: pair.end.record()",
    ): _STATS,
    ("runtime/comm_stats.py", "CommStats.wait_event", "before.record()", "on another stream: before.record()"): _STATS,
    (
        "runtime/comm_stats.py",
        "CommStats.wait_event",
        "torch.cuda.current_stream().wait_event(arrived)",
        "behind the line below",
    ): "The line below keeps two events for the counters, and enqueues nothing.",
    (
        "runtime/transport/nccl.py",
        "_StreamTransfer.wait",
        'self._stats.wait_event("exposed_ms", self._times.end)',
        "behind the line below",
    ): "The line below keeps two events for the counters, and enqueues nothing.",
    (
        "runtime/comm_stats.py",
        "CommStats.read_reached",
        "self._pairs = ...",
        "not kept",
    ): "Only an evaluation calls it, between batches: its times would be counted twice.",
    (
        "runtime/comm_stats.py",
        "EventPair.__init__",
        "self.start.record()",
        "recorded before the line above",
    ): "The line above makes the other event, and enqueues nothing.",
    ("runtime/trace.py", "Trace._now", "event.record()", "on another stream: event.record()"): "It sets a point of a "
    "timeline, which is wrong then. No tensor depends on the event, and no stream waits for it.",
    (
        "runtime/trace.py",
        "Trace.begin_step",
        "if self._on_cuda:",
        "behind the line below",
    ): "The line below makes an empty table, and enqueues nothing.",
    (
        "runtime/trace.py",
        "Trace.end_step",
        "if self._on_cuda:",
        "behind the line below",
    ): "The line below makes empty lists, and enqueues nothing.",
    (
        "features/comm_priority/comm_scheduler.py",
        "CommScheduler.finish",
        "self._launch(self._queue.take_all())",
        "behind with self._stats.waiting('grad_exposed_ms'):",
    ): "The queue is empty there: behind a step's last all-to-all, reductions are launched when they are put. If it "
    "were not, the wait for a micro-op that was not launched would end the run.",
    (
        "features/comm_priority/comm_scheduler.py",
        "CommScheduler._launch",
        "self._launched.popleft()",
        "the last one first",
    ): "It drops a reference. Each micro-op keeps what it sends until it is waited for, in this queue or not.",
    (
        "features/comm_priority/grad_reduction.py",
        "_Collective.wait",
        "self._work.wait()",
        "behind if self._sent is not None and on_cuda(self._sent):",
    ): "A stream that memory was recorded on counts when the memory is given back, which is behind both lines.",
    (
        "features/comm_priority/grad_reduction.py",
        "_recorded",
        "collective.ready = ReadyEvent(collective.gradients)",
        "recorded when the function begins",
    ): "DDP scales and checks gradients before it opens the coalescing manager. Inside, nothing is enqueued.",
    (
        "features/cuda_graphs/stage.py",
        "StageGraphs._route",
        "x.routed = ReadyEvent(x.routing_map_tE)",
        "recorded when the function begins",
    ): "The op before has replayed the graph and copied the map. Here nothing is enqueued.",
    (
        "runtime/all_to_all.py",
        "AllToAll._launch_backward",
        "if self._comm.scheduler is not None:",
        "behind self._backward = self._comm.launch(self.op.mirrored(), grads, splits.reversed())",
    ): "It counts messages in flight, and launches nothing.",
    (
        "runtime/all_to_all.py",
        "AllToAll._wait_backward",
        "if self._comm.store is not None:",
        "behind if self._comm.scheduler is not None:",
    ): "dWs and reductions that become due at the same wait run on streams of their own, behind their own events. A "
    "reduction that such a dW completes would leave one all-to-all later.",
    (
        "runtime/comm.py",
        "Comm.launch",
        "self._launch_pending()",
        "behind self._let_pending_launch(transport)",
    ): "Each of the two returns at once with the other's kind of transport.",
    ("runtime/comm.py", "Comm.launch", "self._let_pending_launch(transport)", "behind exchange.launch()"): _CALLBACKS,
    (
        "runtime/comm.py",
        "Comm._launch_up_to",
        "if self.transport.launches_in_callback:",
        "behind while not exchange.launched.is_set():",
    ): _CALLBACKS,
    (
        "runtime/comm.py",
        "Comm._launch_those_known",
        "self._pending.popleft().launch()",
        "the last one first",
    ): _CALLBACKS,
}
"""The reason why a place can be deleted or changed, by file in the package, outermost function and first line; a change
behind them means this change alone."""

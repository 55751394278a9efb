"""Makes small traces of stock Megatron steps in Kineto's format, from the fields that it documents.

Every op has a time of its own, so that a test knows what is to be read. On a GPU the host's ops take 2 us each, and
what they do is a kernel of that time.
"""

import json
from dataclasses import dataclass, field
from itertools import count
from typing import Any

B, S, H, FFN, EXPERTS, TOPK, VOCAB = 2, 64, 8, 16, 4, 2, 100
ROWS = B * S * TOPK
HOST_US, GAP_US = 2.0, 1.0
NODE = "autograd::engine::evaluate_function: "
LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
FORWARD_US = {
    "embedding": 50.0, "norm": 40.0, "linear_qkv": 300.0, "baddbmm": 100.0, "softmax": 60.0, "bmm": 80.0,
    "linear_proj": 150.0, "add": 30.0, "router": 70.0, "topk": 40.0, "permute": 120.0, "linear_fc1": 400.0,
    "gelu": 90.0, "linear_fc2": 350.0, "unpermute": 110.0, "output_layer": 500.0, "loss": 45.0,
}  # fmt: skip
"""Own times of ops, by a name of this file; in the backward they take twice as long, dX and dW each once."""
MOE, DENSE = "moe", "dense"
NCCL_ARGS = {"Collective name": "all_to_allv", "Process Group Ranks": "[0, 1]"}


@dataclass
class Recipe:
    """What one rank ran.

    Attributes:
        sent: rows to each rank of the group of two; the other rank sends the same.
        on_gpu: whether the ops are kernels.
        te: whether linear layers are Transformer Engine's, whose products are no ops of the host.
        late_us: how much later than its peer this rank launches messages: they wait for it so much less.
        message_us: time of an all-to-all of rows and of one of probabilities, alone.
        before_launch_us: time of the host inside an all-to-all's function before it is launched.
        stage: pipeline stage, and the number of these; the ranks of the stage are a group of two.
        summed_us: time of a tensor-parallel sum behind the attention's projection; 0 for none.
        oddity: what a run does next to the usual: the name of a kind of run that is refused.
    """

    rank: int = 0
    layers: tuple[str, ...] = (MOE, MOE)
    micro_batches: int = 1
    steps: int = 2
    sent: tuple[int, int] = (ROWS // 2, ROWS // 2)
    on_gpu: bool = False
    shapes: bool = True
    te: bool = False
    late_us: float = 0.0
    message_us: tuple[float, float] = (1000.0, 100.0)
    before_launch_us: float = 0.0
    counts_us: float = 60.0
    stage: tuple[int, int] = (0, 1)
    summed_us: float = 0.0
    oddity: str = ""
    groups: dict[str, list[int]] = field(default_factory=lambda: {"EXPERT_MODEL_PARALLEL_GROUP": [0, 1]})


class Writer:
    """Writes events one after the other on the host's clock, and on the GPU's where there is one."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.events: list[dict] = []
        self.now_us = 1e6
        self.device_us = 1e6
        self.thread = 1
        self.sequence = count(10)
        self.correlation = count(1)
        self.made: list[tuple[str, int, dict]] = []

    def op(self, name, us=0.0, calls=(), after=(), kernel="", **args):
        """An op that runs ``calls`` inside; its own work comes first, or behind them if there are any."""
        start_us = self.now_us
        event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": self.thread, "ts": start_us}
        if not self.recipe.shapes:
            args = {key: value for key, value in args.items() if key == "Sequence number"}
        event["args"] = args
        self.events.append(event)
        self.now_us += GAP_US if calls else 0
        for call in calls:
            call()
        if us:
            self.work(us, kernel or f"kernel_of_{name}")
        for call in after:
            call()
        event["dur"] = self.now_us - start_us
        return event

    def work(self, us, kernel, stream=7, **args):
        if not self.recipe.on_gpu:
            self.now_us += us
            return
        correlation = next(self.correlation)
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": self.thread}
        self.events.append({**launch, "ts": self.now_us, "dur": HOST_US, "args": {"correlation": correlation}})
        start_us = max(self.device_us, self.now_us)
        self.now_us += HOST_US
        args |= {"correlation": correlation, "stream": stream, "device": 0, "grid": [16, 1, 1]}
        event = {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": stream, "ts": start_us, "dur": us}
        self.events.append({**event, "args": args})
        self.device_us = start_us + us

    def forward_op(self, kind, name, **args):
        """A forward op with a node of autograd."""
        sequence = next(self.sequence)
        self.made.append((kind, sequence, args))
        return self.op(name, FORWARD_US[kind], **{"Sequence number": sequence, "Fwd thread id": 0}, **args)

    def linear(self, kind, inputs, outputs, rows):
        dims = {"Input Dims": [[rows, inputs], [outputs, inputs]], "Input type": ["float", "float"]}
        self.forward_op(kind, "_Linear" if self.recipe.te else LINEAR, **dims)

    def message(self, us, dims, received, sent, wait_us):
        args: dict[str, Any] = {"Input Dims": [[sum(received), *dims], [sum(sent), *dims], [], [], []]}
        args |= {"Input type": ["float", "float", "", "ScalarList", "ScalarList"]}
        args |= {"Concrete Inputs": ["", "", "", str(list(received)), str(list(sent)), "False"]}
        self.op("c10d::alltoall_base_", after=[lambda: self.wait(us + wait_us)] if self.recipe.on_gpu else (), **args)
        if not self.recipe.on_gpu:
            self.now_us += us + wait_us

    def wait(self, us):
        self.work(us, "ncclDevKernel_SendRecv(...)", 20, **NCCL_ARGS)

    def sum_of_ranks(self):
        """Of tensor-parallel ranks: what follows waits for it, on a GPU without an op of the host."""
        self.op("c10d::_reduce_scatter_base_", after=[lambda: self.on_link(self.recipe.summed_us, "ReduceScatter")])

    def on_link(self, us, name):
        if self.recipe.on_gpu:
            self.work(us, f"ncclDevKernel_{name}_Sum_f32_RING_LL(...)", 21)
        else:
            self.now_us += us

    def counts(self):
        def gather():
            self.op("c10d::_allgather_base_", **{"Input Dims": [[8], [4]]})
            if self.recipe.on_gpu:
                self.work(self.recipe.counts_us, "ncclDevKernel_AllGather_RING_LL(...)", 20)
            else:
                self.now_us += self.recipe.counts_us

        self.op("_GatherFromSequenceParallelRegion", calls=[gather], **{"Sequence number": 0})


def all_to_all(writer, dims, is_back, wait_us, has_node=True):
    recipe = writer.recipe
    us = recipe.message_us[not dims]
    if has_node:
        sequence = next(writer.sequence)
        writer.made.append(("message", sequence, {"dims": dims, "is_back": is_back}))
    received = (recipe.sent[recipe.rank % 2],) * 2
    splits = (recipe.sent, received) if is_back else (received, recipe.sent)
    args = {"Sequence number": sequence} if has_node else {}

    def call():
        writer.now_us += recipe.before_launch_us
        writer.message(us, dims, *splits, wait_us)

    writer.op("_AllToAll", calls=[call], **args)


def forward(writer):
    recipe = writer.recipe
    wait_us = 500.0 - recipe.late_us
    stage, num_stages = recipe.stage
    writer.made = []
    if stage == 0:
        embed(writer)
    for kind in recipe.layers:
        writer.forward_op("norm", "aten::layer_norm")
        writer.linear("linear_qkv", H, 3 * H, B * S)
        writer.forward_op("baddbmm", "aten::baddbmm")
        writer.forward_op("softmax", "aten::softmax")
        writer.forward_op("bmm", "aten::bmm")
        writer.linear("linear_proj", H, H, B * S)
        if recipe.summed_us:
            writer.op("_ReduceScatterToSequenceParallelRegion", calls=[writer.sum_of_ranks])
        writer.forward_op("add", "aten::add")
        writer.forward_op("norm", "aten::layer_norm")
        if kind == MOE:
            moe(writer, wait_us)
        else:
            writer.linear("linear_fc1", H, FFN, B * S)
            writer.forward_op("gelu", "aten::gelu")
            writer.linear("linear_fc2", FFN, H, B * S)
        writer.forward_op("add", "aten::add")
    if stage < num_stages - 1:
        return
    if recipe.oddity == "mtp":
        embed(writer)
    writer.forward_op("norm", "aten::layer_norm")
    writer.linear("output_layer", H, VOCAB, B * S)
    writer.forward_op("loss", "_VocabParallelCrossEntropy")


def embed(writer):
    writer.forward_op("embedding", "aten::embedding", **{"Input Dims": [[VOCAB, H], [B, S], []]})


def moe(writer, wait_us):
    received = 2 * writer.recipe.sent[writer.recipe.rank % 2]
    writer.forward_op("router", "RouterGatingLinearFunction")
    chosen = {"Input Dims": [[B * S, EXPERTS], [], []], "Concrete Inputs": ["", str(TOPK), "-1", "True", "True"]}
    writer.forward_op("topk", "aten::topk", **chosen)
    writer.counts()
    writer.forward_op("permute", "aten::index_select")
    all_to_all(writer, [H], is_back=False, wait_us=wait_us)
    all_to_all(writer, [], is_back=False, wait_us=0.0)
    for _ in range(EXPERTS // 2):
        writer.linear("linear_fc1", H, FFN, received // 2)
        writer.forward_op("gelu", "aten::gelu")
        writer.linear("linear_fc2", FFN, H, received // 2)
    all_to_all(writer, [H], is_back=True, wait_us=wait_us)
    if writer.recipe.oddity == "shared experts during messages":
        writer.linear("linear_fc2", FFN, H, B * S)
    writer.forward_op("unpermute", "aten::scatter_add_")


def backward(writer, made, forward_beside=None):
    """The backward pass of what a forward pass ``made``, with another forward pass in its middle if there is one."""
    writer.thread = 2 if writer.recipe.on_gpu else 1
    writer.now_us += 20.0
    for place, (kind, sequence, args) in enumerate(reversed(made)):
        if forward_beside is not None and place == len(made) // 2:
            forward_beside()
        own = {"Sequence number": sequence, "Fwd thread id": 1}
        us = FORWARD_US.get(kind, 0.0)
        if kind == "message":
            call = lambda args=args: all_to_all(writer, args["dims"], not args["is_back"], 0.0, False)  # noqa: E731
            writer.op(NODE + "_AllToAllBackward", calls=[call], **own)
        elif kind in ("embedding", "loss") or not kind.startswith(("linear", "output")):
            writer.op(NODE + "SomeBackward0", calls=[lambda us=us: writer.op("aten::some", 2 * us)], **own)
        else:
            product = lambda us=us: writer.op("aten::mm", us, kernel="gemm")  # noqa: E731
            num_products = 1 if writer.recipe.oddity == "dW elsewhere" else 2
            gemm = lambda us=us: writer.work(us, "nvjet_gemm")  # noqa: E731
            fused = lambda gemm=gemm: writer.op("_LinearBackward", after=[gemm] * num_products)  # noqa: E731, B023
            writer.op(NODE + "LinearBackward", calls=[fused] if writer.recipe.te else [product, product], **own)
            writer.op(NODE + "torch::autograd::AccumulateGrad")
    writer.thread = 1


def run_micro_batches(writer):
    """Forward and backward passes; on pipeline stages in the order 1F1B, with messages around each."""
    recipe = writer.recipe
    stage, num_stages = recipe.stage
    num_ahead = min(recipe.micro_batches, num_stages - 1 - stage)
    made = []
    for number in range(recipe.micro_batches + num_ahead):
        if number < recipe.micro_batches:
            point_to_point(writer, "c10d::recv_", stage > 0)
            forward(writer)
            made.append(writer.made)
            point_to_point(writer, "c10d::send", stage < num_stages - 1)
        if number >= num_ahead:
            point_to_point(writer, "c10d::recv_", stage < num_stages - 1)
            beside = (lambda: forward(writer)) if recipe.oddity == "overlap of micro-batches" else None
            backward(writer, made.pop(0), beside)
            point_to_point(writer, "c10d::send", stage > 0)
        writer.now_us = writer.device_us = max(writer.now_us, writer.device_us)


def point_to_point(writer, name, is_there):
    if is_there:
        writer.op(name, **{"Input Dims": [[[S, B, H]], [], []]})
        writer.now_us += 300.0  # the wait for the other stage, in which nothing is recorded


def trace(recipe):
    """The trace of a recipe, for ``json.dumps``."""
    writer = Writer(recipe)
    for number in range(recipe.steps):
        start_us = writer.now_us
        marker: dict[str, Any] = {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{5 + number}",
            "pid": 1,
            "tid": 1,
        }
        marker |= {"ts": start_us, "args": {}}
        writer.now_us += 10.0
        run_micro_batches(writer)
        writer.now_us += 200.0
        writer.op("Optimizer.step#AdamW.step")
        marker["dur"] = writer.now_us - start_us
        writer.events.append(marker)
    groups = [{"pg_name": name, "pg_desc": name, "ranks": ranks} for name, ranks in recipe.groups.items()]
    return {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "numSms": 132}] if recipe.on_gpu else [],
        "distributedInfo": {"backend": "gloo", "rank": recipe.rank, "world_size": 2, "pg_config": groups},
        "traceEvents": writer.events,
    }


def write(folder, *recipes):
    """Writes traces; returns their paths."""
    paths = []
    for recipe in recipes:
        path = folder / f"rank-{recipe.rank}.json"
        path.write_text(json.dumps(trace(recipe)))
        paths.append(path)
    return paths

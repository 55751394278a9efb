"""Made-up traced steps whose causes of waits are known: ranks compute, send, wait, one message at a time."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_lancet.lab.causes.traced import TracedRank
from megatron_lancet.schedule.timeline import Lane, RankTimeline, Span

OP_MS = {"attention": 6.0, "route": 1.0, "preprocess": 2.0, "postprocess": 1.0, "head": 3.0}
ROW_MS = 0.02
ROW_BYTES = 1000


@dataclass
class Made:
    """A step to make up.

    Attributes:
        rows: rows that each rank's experts receive in each layer.
        pace: factor of all ops by rank.
        blocked_ms: sleep of a rank in an op of the first micro-batch.
        fixed_ms: what experts take without rows.
        has_backward: whether a backward follows each forward. It runs weight gradients while a message is in flight.
        ms_per_byte: of the link.
        counts_ms: of an exchange of token counts.
        has_collectives: whether a message is at all ranks at once, as long as its largest part takes.
    """

    num_layers: int = 3
    num_micro_batches: int = 2
    rows: tuple[int, ...] = (500, 500)
    pace: Mapping[int, float] = field(default_factory=dict)
    blocked_ms: Mapping[tuple[int, str], float] = field(default_factory=dict)
    late_ms: Mapping[int, float] = field(default_factory=dict)
    fixed_ms: float = 0.0
    has_backward: bool = False
    ms_per_byte: float = 2e-5
    counts_ms: float = 0.5
    has_collectives: bool = False

    def ranks(self) -> list[TracedRank]:
        """The traces of all ranks."""
        self._num_ranks = len(self.rows)
        self._spans: list[list[Span]] = [[] for _ in self.rows]
        self._queues: list[list[tuple[str, float]]] = [[] for _ in self.rows]
        self._now = [self.late_ms.get(rank, 0.0) for rank in range(self._num_ranks)]
        self._blocked: list[list[tuple[float, float, float]]] = [[] for _ in self.rows]
        self._free = [float("-inf")] * self._num_ranks
        received: dict[str, tuple[int, ...]] = {}
        self._bytes_to: list[dict[str, list[tuple[int, ...]]]] = [defaultdict(list) for _ in self.rows]
        for micro_batch in range(self.num_micro_batches):
            for layer in range(1, self.num_layers + 1):
                self._layer(f"L{layer}.c0.F", micro_batch)
                received[f"L{layer}.c0.F.experts"] = ()
            if self.has_backward:
                self._backward(micro_batch)
        return [
            TracedRank(
                RankTimeline(rank, tuple(sorted(self._spans[rank], key=lambda span: span.start_ms)), self._now[rank]),
                self.late_ms.get(rank, 0.0),
                dict.fromkeys(received, (self.rows[rank],) * self.num_micro_batches),
                {name: tuple(sent) for name, sent in self._bytes_to[rank].items()},
                tuple(self._blocked[rank]),
            )
            for rank in range(self._num_ranks)
        ]

    def _layer(self, name: str, micro_batch: int) -> None:
        self._compute(f"{name}.attention", micro_batch)
        self._compute(f"{name}.route", micro_batch)
        counted = max(self._now) + self.counts_ms
        for rank, spans in enumerate(self._spans):
            spans.append(Span(f"{name}.counts", Lane.COMM, self._now[rank], counted, 32))
        self._compute(f"{name}.preprocess", micro_batch)
        self._send(f"{name}.dispatch", counted, to_experts=True)
        self._compute(f"{name}.experts", micro_batch)
        self._send(f"{name}.combine", 0.0, to_experts=False)
        self._compute(f"{name}.postprocess", micro_batch)

    def _backward(self, micro_batch: int) -> None:
        self._compute("F.head", micro_batch)
        for layer in range(self.num_layers, 0, -1):
            name = f"L{layer}.c0.I"
            self._compute(f"{name}.postprocess", micro_batch)
            self._send(f"{name}.combine", 0.0, to_experts=True)
            self._compute(f"{name}.experts", micro_batch)
            self._put(f"L{layer}.W.mlp.experts", ["linear_fc1", "linear_fc2"], self.rows)
            self._send(f"{name}.dispatch", 0.0, to_experts=False)
            self._compute(f"{name}.attention", micro_batch)
            self._put(f"L{layer}.W.self_attention", ["linear_qkv", "linear_proj", "core"], (150,) * self._num_ranks)
        for rank in range(self._num_ranks):
            while self._queues[rank]:
                self._run_weight_grad(rank)

    def _put(self, module: str, weights: list[str], rows: tuple[int, ...]) -> None:
        for rank, queue in enumerate(self._queues):
            ms = rows[rank] * ROW_MS * self.pace.get(rank, 1.0)
            queue += [(f"{module}.{weight}", ms) for weight in weights]

    def _run_weight_grad(self, rank: int) -> None:
        name, ms = self._queues[rank].pop(0)
        self._spans[rank].append(Span(name, Lane.COMPUTE, self._now[rank], self._now[rank] + ms))
        self._now[rank] += ms

    def _compute(self, name: str, micro_batch: int) -> None:
        kind = name.rpartition(".")[2]
        for rank, spans in enumerate(self._spans):
            own_ms = self.fixed_ms + self.rows[rank] * ROW_MS if kind == "experts" else OP_MS[kind]
            busy_ms = own_ms * self.pace.get(rank, 1.0)
            blocked_ms = self.blocked_ms.get((rank, name), 0.0) if micro_batch == 0 else 0.0
            start_ms = self._now[rank]
            self._now[rank] += busy_ms + blocked_ms
            spans.append(Span(name, Lane.COMPUTE, start_ms, self._now[rank]))
            if blocked_ms:
                self._blocked[rank].append((start_ms, self._now[rank], blocked_ms))

    def _send(self, name: str, counted_ms: float, to_experts: bool) -> None:
        """A message: each rank sends equally much to all for each row that a rank receives, or the other way round."""
        num_ranks = self._num_ranks
        launched = [max(now_ms, counted_ms) for now_ms in self._now]
        ready_ms = max(launched)
        to = [
            [
                0 if a == b else round(self.rows[b if to_experts else a] / num_ranks) * ROW_BYTES
                for b in range(num_ranks)
            ]
            for a in range(num_ranks)
        ]
        sent, received = [sum(row) for row in to], [sum(column) for column in zip(*to, strict=True)]
        for rank in range(num_ranks):
            others = [other for other in range(num_ranks) if other != rank or self.has_collectives]
            # A rank is done with its part when those that it sends to have all that they receive.
            size = max(max(sent[one], *(received[to] for to in range(num_ranks) if to != one)) for one in others)
            arrived_ms = ready_ms + (self.counts_ms + size * self.ms_per_byte if self.ms_per_byte else 0.0)
            self._spans[rank].append(Span(name, Lane.COMM, launched[rank], arrived_ms, sum(to[rank])))
            while self._queues[rank] and self._now[rank] < arrived_ms:
                self._run_weight_grad(rank)
            self._spans[rank].append(Span(name, Lane.WAIT, self._now[rank], max(self._now[rank], arrived_ms)))
            self._now[rank] = max(self._now[rank], arrived_ms)
            self._bytes_to[rank][name].append(tuple(to[rank]))

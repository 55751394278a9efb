"""Evaluates the batches of a skewed text with each variant in turns: equal losses, timed batch by batch."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import cycle, islice, product
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.evaluation.cases import BASELINE, FIELDS, PLANS, REPLICAS, zipf_shares
from benchmarks.harness.bench import TOLERANCE, Bench, CpuWatch, WrongResultError, say
from benchmarks.harness.cases import Case, Shape, rotated
from benchmarks.harness.rate import RateSearch
from benchmarks.training_step.links import CPU, Link, sent_bytes
from benchmarks.training_step.model import build
from benchmarks.training_step.routing import set_expert_shares
from megatron_lancet.inference.evaluate import Batch, TokenStream, batches, summed_loss
from megatron_lancet.inference.load import LoadedModel
from megatron_lancet.inference.replica_choice import choose_for, expected_rows
from megatron_lancet.inference.replicas import Replicas, make_replicas
from megatron_lancet.inference.routing import measured_popularity
from megatron_lancet.model.gpt import overlap, set_plan
from megatron_lancet.patching import replaced
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.plan import Plan

_TOPIC = 64
"""Half of a batch's tokens have ids out of this many, which change in each batch: experts' popularity drifts."""
_WARM_UP_BATCHES = 2
_RATE_CORRECTIONS = 3
_BATCHES_PER_RATE = 5
_OTHER_TRAFFIC, _OTHER_TRAFFIC_BYTES = 0.02, 50_000
"""On the wire next to rows: headers, a share of them; counts, and what each message costs."""


def skewed_text(shape: Shape, num_batches: int, num_ranks: int) -> TokenStream:
    """Tokens whose topic changes from batch to batch of all ranks."""
    dice = np.random.default_rng(1)
    per_batch = shape.micro_batch * num_ranks * shape.seq_length
    parts = []
    for _ in range(num_batches):
        topic = dice.integers(shape.vocab - _TOPIC) + dice.integers(_TOPIC, size=per_batch)
        parts.append(np.where(dice.random(per_batch) < 0.5, topic, dice.integers(shape.vocab, size=per_batch)))
    return TokenStream(np.append(np.concatenate(parts), 0).astype(np.int64), None)


class _Text:
    """A model, a text, the model's replicas, and the model prepared for plans."""

    def __init__(self, case: Case, num_batches: int, link: Link) -> None:
        """Collective.

        Args:
            link: that the messages of plans take.
        """
        module = build(case.shape).eval()
        size = case.shape.micro_batch
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.model = LoadedModel(module, case.shape.seq_length, False, CPU, rank, num_ranks)
        stream = skewed_text(case.shape, num_batches, num_ranks)
        self.batches = list(batches(self.model, stream, size))
        # Topics average out over the first batches of the text.
        whole = Batch(*(torch.cat(parts) for parts in zip(*map(_parts, self.batches[:8]), strict=True)))
        set_expert_shares(module, lambda: summed_loss(self.model, whole), zipf_shares(case.shape.experts))
        self.popularity = measured_popularity(self.model, stream, size, None)
        self.replicas: dict[str, Replicas] = {}
        self.expected: dict[str, dict[str, float]] = {}
        for name in case.variants:
            number = REPLICAS.get(name, 0)
            holders = choose_for(self.model, self.popularity, number)
            if number:
                self.replicas[name] = make_replicas(self.model, holders, ranks_per_node=None)
            self.expected[name] = asdict(expected_rows(self.popularity, holders, None)[1])
        overlap(module, PLANS["chunks-2"], Comm(link.transport, None, link.stats, own_rank=rank))

    def running(self, name: str) -> AbstractContextManager[None]:
        """Inside, the model runs with the replicas of a variant, or by its plan."""
        if name in PLANS:
            return self._planned(PLANS[name])
        return self.replicas[name].active() if name in self.replicas else nullcontext()

    @contextmanager
    def _planned(self, plan: Plan) -> Iterator[None]:
        with replaced(self.model.module.decoder, "overlaps_evaluation", True):
            set_plan(self.model.module, plan)
            yield


def _parts(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.inputs, batch.labels, batch.weights


class EvaluationBench(Bench):
    """Evaluates each batch with all variants one after the other, in an order that rotates."""

    _ready: tuple[Shape, _Text] | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        text = self._ready_for(case)
        rate_bps = self.job.rate_bps or self._rate_for(case, text)
        self._set_rate(rate_bps)
        say(f"  {rate_bps / 1e6:.0f} Mbit/s")
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "tokens_per_batch": case.shape.micro_batch * case.shape.seq_length * dist.get_world_size(),
            "replicas": {name: REPLICAS.get(name, 0) for name in case.variants},
            "plans": {name: str(PLANS[name]) for name in case.variants if name in PLANS},
            "replica_bytes": {name: its.num_bytes for name, its in text.replicas.items()},
            "expected": text.expected,
            "sample_fields": FIELDS,
            "sweeps": [self._pass_over(index, case, text) for index in range(self.job.sweeps)],
        }

    def _ready_for(self, case: Case) -> _Text:
        """The text with all variants, warm."""
        if self._ready is None or self._ready[0] != case.shape:
            self._ready = None
            self.warm_up()
            text = _Text(case, self.job.repeats, self.links[False])
            for batch, name in product(text.batches[:_WARM_UP_BATCHES], case.variants):
                self._batch(text, name, batch)
            self._ready = case.shape, text
        return self._ready[1]

    def _rate_for(self, case: Case, text: _Text) -> float:
        """The rate at which the baseline waits for the case's share of a batch. Collective."""
        assert case.exposed_share is not None
        search: RateSearch | None = None
        some = cycle(text.batches)
        for _ in range(_RATE_CORRECTIONS + 1):
            ranks = [self._batch(text, BASELINE, batch)[0] for batch in islice(some, _BATCHES_PER_RATE)]
            exposed_ms = median(mean(rank["exposed_ms"] for rank in batch) for batch in ranks)
            step_ms = median(max(rank["step_ms"] for rank in batch) for batch in ranks)
            if search is None:  # the link is as good as free
                sent = median(max(rank["payload_bytes"] for rank in batch) for batch in ranks)
                search = RateSearch(case.exposed_share, step_ms - exposed_ms, exposed_ms, sent)
            else:
                say(f"  at {search.rate_bps / 1e6:.0f} Mbit/s {BASELINE} exposes {exposed_ms / step_ms:.1%}")
                if not search.correct(exposed_ms, step_ms):
                    break
            self._set_rate(search.rate_bps)
        assert search is not None
        return search.rate_bps

    def _pass_over(self, index: int, case: Case, text: _Text) -> dict[str, Any]:
        """All batches, each with all variants. Collective.

        Raises:
            WrongResultError: a variant changes the loss of a batch.
        """
        samples: dict[str, list[list[list[float]]]] = {name: [] for name in case.variants}
        watch, largest = CpuWatch(self.job.cores), 0.0
        for number, batch in enumerate(text.batches):
            losses = {}
            for name in rotated(case.variants, number):
                ranks, losses[name] = self._batch(text, name, batch)
                samples[name].append([[round(rank[field], 4) for field in FIELDS] for rank in ranks])
            largest = max(largest, *(abs(loss / losses[BASELINE] - 1) for loss in losses.values()))
            if largest > TOLERANCE:
                raise WrongResultError(f"a variant changes the loss of batch {number} by {largest:.1e} of it")
        seen = watch.seen(f"sweep {index + 1} of {self.job.sweeps}")
        return {"disturbance": seen, "largest_loss_error": largest, "samples": samples}

    def _batch(self, text: _Text, name: str, batch: Batch) -> tuple[list[Mapping[str, float]], float]:
        """One batch: of each rank the values by field, and the loss of all ranks. Collective.

        Raises:
            WrongResultError: bytes that belong on the shaped link went elsewhere, or others went over it.
        """
        before = sent_bytes(self._shaped_name)
        with text.running(name), self._timed() as found:
            loss = summed_loss(text.model, batch)
        dist.barrier()  # what is still in the link's queue has left
        found["wire_bytes"] = float(sent_bytes(self._shaped_name) - before)
        due = found["payload_bytes"]
        if not due <= found["wire_bytes"] <= (1 + _OTHER_TRAFFIC) * due + _OTHER_TRAFFIC_BYTES:
            raise WrongResultError(
                f"{name} should send {due:.0f} bytes of rows over the shaped link, but {found['wire_bytes']:.0f} bytes "
                "went over it"
            )
        own = torch.tensor([*(found[field] for field in FIELDS), float(loss)], dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        ranks = [dict(zip(FIELDS, values.tolist()[:-1], strict=True)) for values in everyone]
        return [*ranks], sum(values[-1].item() for values in everyone)

    @contextmanager
    def _timed(self) -> Iterator[dict[str, float]]:
        """Inside, rows travel on the shaped link; afterwards the values of a batch but ``wire_bytes``."""
        link = self.links[False]
        found: dict[str, float] = {}
        with link.carries_stock():
            link.stats.take()
            link.take_sent_bytes()
            dist.barrier()
            cpu_s, start_s = time.process_time(), time.perf_counter()
            yield found
            end_s = time.perf_counter()
        stats = link.stats.take()
        found["step_ms"] = (end_s - start_s) * 1e3
        found["exposed_ms"] = stats.exposed_ms + stats.counts_exposed_ms
        found["cpu_ms"] = (time.process_time() - cpu_s) * 1e3
        found["payload_bytes"] = float(link.take_sent_bytes())


BENCH = EvaluationBench

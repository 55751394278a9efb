"""Runs the documents of each step in all ways of packing in turns: equal losses, timed micro-batch by micro-batch."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from statistics import mean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.bins.cases import BASELINE, FIELDS, FILLED, PADDED, PLAN, ROWS, computed_tokens, dealings
from benchmarks.bins.documents import Documents, MicroBatch, packed, padded_to
from benchmarks.harness.bench import Bench, CpuWatch, WrongResultError, largest_error, say
from benchmarks.harness.cases import Case, Variant, rotated
from benchmarks.harness.rate import RateSearch
from benchmarks.training_step.links import Link
from benchmarks.training_step.model import build, wrap
from benchmarks.training_step.routing import set_expert_shares
from megatron_lancet.model.gpt import overlap
from megatron_lancet.planning.documents.cost import DocumentCost
from megatron_lancet.planning.sizes.attention import tokens_per_pair
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.runtime.weight_grad_store import WeightGradStore

_LOSS_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 5e-3
"""Of its norm. Ways of packing sum in different orders, by which one token in 100,000 chooses another expert; a
document that saw another one's tokens would change gradients by more than this."""
_RATE_CORRECTIONS = 3
_ROWS_PER_RATE = 3


class _Model:
    """The model of all variants, which differ in their micro-batches only."""

    def __init__(self, case: Case, link: Link, full: MicroBatch) -> None:
        """Collective.

        Args:
            link: that rows and counts take.
            full: micro-batch of this rank by which the router's bias is set; as many tokens on all ranks.
        """
        self._link = link
        self.module = build(case.shape)
        own_rank = parallel_state.get_expert_model_parallel_rank()
        comm = Comm(link.transport, WeightGradStore.of(PLAN, link.stats), link.stats, own_rank)
        overlap(self.module, PLAN, comm, sdpa=True, overlaps_evaluation=True, documents=True)
        set_expert_shares(self.module, lambda: self._losses(self.module, full), case.shape.expert_shares())
        self._ddp = wrap(self.module, Variant("bins", PLAN))

    @staticmethod
    def _losses(module: Any, batch: MicroBatch) -> torch.Tensor:
        """Of all positions, [B, S]."""
        losses: torch.Tensor = module(
            batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed
        )
        return losses.float()

    def step(self, batches: Sequence[MicroBatch], num_tokens: int) -> tuple[dict[str, float], list[float], float]:
        """One step, begun together with the other ranks.

        Args:
            num_tokens: of the documents of all ranks, over which losses are averaged.

        Returns:
            The values of :data:`FIELDS`, the compute of each micro-batch in ms without waits, and this rank's part of
            the loss.
        """
        stats = self._link.stats
        self._ddp.zero_grad_buffer()
        stats.take()
        self._link.take_sent_bytes()
        compute_ms, exposed_ms, loss_sum = [], 0.0, 0.0
        dist.barrier()
        cpu_s, start_s = time.process_time(), time.perf_counter()
        with self._ddp.no_sync():
            for batch in batches:
                begin_s = time.perf_counter()
                loss = (self._losses(self._ddp, batch) * batch.loss_mask).sum() / num_tokens
                loss.backward()
                waits = stats.take()
                waited_ms = waits.exposed_ms + waits.counts_exposed_ms
                compute_ms.append((time.perf_counter() - begin_s) * 1e3 - waited_ms)
                exposed_ms += waited_ms
                loss_sum += loss.item()
        values = {
            "step_ms": (time.perf_counter() - start_s) * 1e3,
            "exposed_ms": exposed_ms,
            "cpu_ms": (time.process_time() - cpu_s) * 1e3,
            "payload_bytes": float(self._link.take_sent_bytes()),
        }
        return values, compute_ms, loss_sum

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the last step left, summed over the ranks that hold a parameter. Collective."""
        found = {}
        for name, parameter in self.module.named_parameters():
            found[name] = parameter.main_grad.clone()
            if getattr(parameter, "allreduce", True):  # Megatron's mark of parameters that every rank has
                dist.all_reduce(found[name])
        return found


class BinsBench(Bench):
    """Runs the documents of each step in all ways of packing, in an order that rotates."""

    def measure(self, case: Case) -> dict[str, Any]:
        """Everything about a case, for the JSON file."""
        say(f"case {case.name}: {case.title}")
        self.warm_up()
        assert self.job.data is not None
        shape, rank, num_ranks = case.shape, dist.get_rank(), dist.get_world_size()
        documents = Documents(self.job.data, case.name, shape, self.job.repeats, num_ranks, FILLED)
        full = documents.filled(rank)
        model = _Model(case, self.links[False], full)
        row = MicroBatch(full.tokens, torch.arange(shape.seq_length)[None], full.labels, full.loss_mask, None)
        cost = DocumentCost(tokens_per_pair(model.module.config, shape.vocab))
        say(f"  {documents.num_documents} documents of a step on a rank; {cost}")
        run = _Runs(case, model, documents, cost)
        error = run.check()
        rate_bps = self.job.rate_bps or self._rate_for(case, model, row)
        self._set_rate(rate_bps)
        say(f"  {rate_bps / 1e6:.0f} Mbit/s")
        lengths = [length for step in documents.steps for rank in step for length in rank]
        return {
            **asdict(case),
            "rate_bps": rate_bps,
            "plan": str(PLAN),
            "tokens_per_pair": cost.tokens_per_pair,
            "documents": {
                "per_rank": documents.num_documents,
                "mean_tokens": mean(lengths),
                "deciles_tokens": quantiles(lengths, n=10),
                "most_tokens": max(lengths),
            },
            "num_tokens": run.num_tokens,
            "computed_tokens": run.computed_tokens,
            "largest_gradient_error": error,
            "sample_fields": FIELDS,
            "sweeps": self._sweeps(run),
        }

    def _rate_for(self, case: Case, model: _Model, row: MicroBatch) -> float:
        """The rate at which micro-batches without imbalance wait for the case's share of their time. Collective."""
        assert case.exposed_share is not None
        search: RateSearch | None = None
        for _ in range(_RATE_CORRECTIONS + 1):
            steps = [_on_all_ranks(*model.step([row], 2 * row.tokens.numel())[:2])[0] for _ in range(_ROWS_PER_RATE)]
            exposed_ms = median(mean(rank["exposed_ms"] for rank in ranks) for ranks in steps)
            step_ms = median(max(rank["step_ms"] for rank in ranks) for ranks in steps)
            if search is None:  # the link is as good as free
                sent = median(max(rank["payload_bytes"] for rank in ranks) for ranks in steps)
                search = RateSearch(case.exposed_share, step_ms - exposed_ms, exposed_ms, sent)
            else:
                say(f"  at {search.rate_bps / 1e6:.0f} Mbit/s full rows expose {exposed_ms / step_ms:.1%}")
                if not search.correct(exposed_ms, step_ms):
                    break
            self._set_rate(search.rate_bps)
        assert search is not None
        return search.rate_bps

    def _sweeps(self, run: "_Runs") -> list[dict[str, Any]]:
        """Samples of all sweeps, and what disturbed them. Collective."""
        sweeps = []
        for index in range(self.job.sweeps):
            watch = CpuWatch(self.job.cores)
            found = run.sweep()
            sweeps.append({"disturbance": watch.seen(f"sweep {index + 1} of {self.job.sweeps}"), **found})
        return sweeps


class _Runs:
    """The documents of all steps in all ways of packing.

    Attributes:
        num_tokens: of the documents of each step, on all ranks.
        computed_tokens: by variant and step, with padding.
    """

    def __init__(self, case: Case, model: _Model, documents: Documents, cost: DocumentCost) -> None:
        ways = dealings(case.shape, cost)
        self._case, self._model, self._documents = case, model, documents
        self._deals = {name: [ways[name](step) for step in documents.steps] for name in case.variants}
        self.num_tokens = [sum(map(sum, step)) for step in documents.steps]
        self.computed_tokens = {
            name: [
                sum(map(sum, computed_tokens(name, drawn, dealing, case.shape)))
                for drawn, dealing in zip(documents.steps, dealings_of_steps, strict=True)
            ]
            for name, dealings_of_steps in self._deals.items()
        }

    def _batches(self, name: str, number: int) -> list[MicroBatch]:
        """Micro-batches of this rank."""
        made = []
        for indices in self._deals[name][number].bins[dist.get_rank()]:
            texts = self._documents.text_of(number, indices)
            if name == ROWS:
                made.append(padded_to(texts, self._case.shape.seq_length))
            elif name == PADDED:
                made.append(padded_to(texts, max(len(text) - 1 for text in texts)))
            else:
                made.append(packed(texts))
        return made

    def check(self) -> float:
        """The largest error of a loss or gradient of the first step in any way of packing. Collective.

        Raises:
            WrongResultError: one is above the tolerance.
        """
        expected, largest = {}, 0.0
        for name in [BASELINE, *(name for name in self._case.variants if name != BASELINE)]:
            self._model.step(self._batches(name, 0), self.num_tokens[0])
            gradients = self._model.gradients()
            if name == BASELINE:
                expected = gradients
            else:
                error = largest_error(name, gradients, expected, BASELINE, _GRADIENT_TOLERANCE)
                largest = max(largest, error)
        return largest

    def sweep(self) -> dict[str, Any]:
        """All steps, each in all ways of packing. Collective.

        Raises:
            WrongResultError: a way of packing changes the loss of a step.
        """
        samples: dict[str, list[Any]] = {name: [] for name in self._case.variants}
        compute_ms: dict[str, list[Any]] = {name: [] for name in self._case.variants}
        largest = 0.0
        for number, names in zip(range(len(self.num_tokens)), cycle([self._case.variants]), strict=False):
            losses = {}
            for name in rotated(names, number):
                batches = self._batches(name, number)
                values, own_ms, loss = self._model.step(batches, self.num_tokens[number])
                ranks, of_ranks = _on_all_ranks(values, own_ms)
                samples[name].append([[round(rank[field], 4) for field in FIELDS] for rank in ranks])
                compute_ms[name].append([[round(ms, 4) for ms in rank] for rank in of_ranks])
                total = torch.tensor(loss, dtype=torch.float64)
                dist.all_reduce(total)
                losses[name] = total.item()
            largest = max(largest, *(abs(loss / losses[BASELINE] - 1) for loss in losses.values()))
            if largest > _LOSS_TOLERANCE:
                raise WrongResultError(f"a way of packing changes the loss of step {number} by {largest:.1e} of it")
        return {"largest_loss_error": largest, "samples": samples, "compute_ms": compute_ms}


def _on_all_ranks(
    values: dict[str, float], compute_ms: Sequence[float]
) -> tuple[list[dict[str, float]], list[list[float]]]:
    """Of each rank the values by field, and the compute of its micro-batches. Collective."""
    own = torch.tensor([*(values[field] for field in FIELDS), *compute_ms], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    ranks = [dict(zip(FIELDS, found.tolist(), strict=False)) for found in everyone]
    return ranks, [found[len(FIELDS) :].tolist() for found in everyone]


BENCH = BinsBench

"""The part of a benchmark that runs on a rank: links, the rate of the shaped one, checks, and turns of variants."""

import gc
import math
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.gradient_error import relative_errors, worst
from benchmarks.harness import disturbance
from benchmarks.harness.cases import Case, rotated
from benchmarks.harness.job import Job
from benchmarks.harness.namespaces import NUM_NODES, run_command, shaping_command
from benchmarks.harness.rate import RateSearch
from benchmarks.harness.samples import by_node
from benchmarks.training_step.links import Link, sent_bytes
from benchmarks.training_step.sample import SAMPLE_FIELDS, Sample, on_all_ranks
from benchmarks.training_step.step import Step
from megatron_lancet.schedule.nodes import Nodes

TOLERANCE = 2e-6
"""Of the norm of stock's gradient, and of stock's loss: fp32 sums in another order."""
_WARM_UP_BPS = 2e9
_RATE_CORRECTIONS = 3
_MICRO_BATCHES_PER_RATE = 3
"""That are measured, at least, at each rate that the search proposes."""
_OTHER_TRAFFIC = 0.02
_OTHER_TRAFFIC_BYTES = 50_000
"""On the wire next to payload and gradients: headers, a share of both; counts, norms for clipping and what each message
costs, for each micro-batch."""
COUNTED_FIELDS = [*SAMPLE_FIELDS, "wire_bytes"]
"""Names of the values of :meth:`Bench.counted`."""

RankSamples = list[list[float]]
"""One step: of each rank, the values in the order of :data:`COUNTED_FIELDS`, or of :data:`SAMPLE_FIELDS`."""


class WrongResultError(Exception):
    """A variant computed something else than its reference, or used the wrong link."""


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


class Bench:
    """The links of this rank and what is measured over them.

    Attributes:
        job: what is to be measured.
        links: the shaped one, and at ``True`` the free one.
        ranks_per_node: ranks that share an interface.
    """

    def __init__(self, job: Job, shaped: str, free: str, timeout: timedelta) -> None:
        """Collective.

        Args:
            shaped: name of the interface whose rate is capped.
            free: of the other one.
        """
        self.job = job
        self.ranks_per_node = job.ranks_per_node
        self._shaped_name = shaped
        self.warm_up()
        ep_group = parallel_state.get_expert_model_parallel_group()
        nodes = Nodes(NUM_NODES, self.ranks_per_node) if self.ranks_per_node > 1 else None
        self.links = {
            is_free: Link(interface, ep_group, timeout, nodes) for is_free, interface in ((False, shaped), (True, free))
        }

    def warm_up(self) -> None:
        """A fast link, on which models are built and checked, and no memory of earlier ones. Collective."""
        gc.collect()  # models and their DDP hooks refer to each other
        self._set_rate(_WARM_UP_BPS)

    def _set_rate(self, rate_bps: float) -> None:
        """Cap what this node sends; the other one does the same. Collective."""
        dist.barrier()
        if dist.get_rank() % self.ranks_per_node == 0:
            run_command(shaping_command(self._shaped_name, rate_bps))
        dist.barrier()

    def set_rate_for(self, case: Case, baseline: Step, free: Step) -> float:
        """Set the job's rate, or that at which the baseline waits for the case's share of its passes. Collective.

        Args:
            free: the same step on a link that takes no time.

        Returns:
            Bits per second.
        """
        rate_bps = self.job.rate_bps
        if rate_bps is None:
            assert case.exposed_share is not None, "the free link has no rate"
            rate_bps = self._find_rate(case.exposed_share, baseline, free)
        self._set_rate(rate_bps)
        return rate_bps

    def _find_rate(self, share: float, baseline: Step, free: Step) -> float:
        free.run()
        exposed_ms, passes_ms, payload_bytes = self._exposure(free)
        search = RateSearch(share, passes_ms - exposed_ms, exposed_ms, payload_bytes)
        for _ in range(_RATE_CORRECTIONS):
            self._set_rate(search.rate_bps)
            baseline.run()
            exposed_ms, passes_ms, _ = self._exposure(baseline)
            say(f"  at {search.rate_bps / 1e6:.0f} Mbit/s {baseline.variant.name} exposes {exposed_ms / passes_ms:.1%}")
            if not search.correct(exposed_ms, passes_ms):
                break
        return search.rate_bps

    def _exposure(self, step: Step) -> tuple[float, float, float]:
        """Medians over some steps: exposed time (mean of the ranks), both passes (slower rank), bytes (larger node)."""
        exposed, passes, sent = [], [], []
        for _ in range(math.ceil(_MICRO_BATCHES_PER_RATE / step.shape.micro_batches)):
            ranks = [Sample(*values) for values in on_all_ranks(step.run()[0])]
            exposed.append(statistics.mean(rank.exposed_ms for rank in ranks))
            passes.append(max(rank.forward_ms + rank.backward_ms for rank in ranks))
            of_nodes = by_node(ranks, self.ranks_per_node)
            sent.append(max(sum(rank.payload_bytes for rank in node) for node in of_nodes))
        return statistics.median(exposed), statistics.median(passes), statistics.median(sent)

    def counted(self, step: Step) -> tuple[RankSamples, torch.Tensor]:
        """One step's samples of all ranks with the bytes on the shaped interface of their node, and this rank's loss.

        The ranks of a node have the same bytes. Collective.

        Raises:
            WrongResultError: bytes that belong on the shaped link went elsewhere, or others went over it.
        """
        before = sent_bytes(self._shaped_name)
        sample, loss = step.run()
        dist.barrier()  # what is still in the link's queue has left
        on_wire = float(sent_bytes(self._shaped_name) - before)
        ranks = on_all_ranks(sample, on_wire)
        samples = [dict(zip(COUNTED_FIELDS, values, strict=True)) for values in ranks]
        for of_node in by_node(samples, self.ranks_per_node):
            _check_bytes(step, of_node)
        return ranks, loss

    def sweep(self, index: int, steps: Mapping[str, Step]) -> dict[str, Any]:
        """All variants in turns, in an order that rotates from repeat to repeat; for the JSON file. Collective.

        Args:
            index: of the sweep.

        Raises:
            WrongResultError: see :meth:`counted`.
        """
        samples: dict[str, list[RankSamples]] = {name: [] for name in steps}
        watch = CpuWatch(self.job.cores)
        for repeat in range(self.job.repeats):
            for name in rotated(list(steps), repeat):
                samples[name].append(self.counted(steps[name])[0])
        return {"disturbance": watch.seen(f"sweep {index + 1} of {self.job.sweeps}"), "samples": samples}


def _check_bytes(step: Step, of_node: Sequence[Mapping[str, float]]) -> None:
    """
    Args:
        of_node: samples of the ranks that share an interface.
    """
    sent, reduced = (sum(rank[field] for rank in of_node) for field in ("payload_bytes", "reduced_bytes"))
    due = reduced + (0.0 if step.variant.free_link else sent)
    others = _OTHER_TRAFFIC * (sent + reduced) + _OTHER_TRAFFIC_BYTES * step.shape.micro_batches * len(of_node)
    for rank in of_node:
        if not due <= rank["wire_bytes"] <= due + others:
            raise WrongResultError(
                f"{step.variant.name} should send {due - reduced:.0f} bytes of rows and {reduced:.0f} of gradients "
                f"over a node's shaped link, but {rank['wire_bytes']:.0f} bytes went over it"
            )


def largest_error(
    name: str,
    results: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    reference: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Largest relative error of a loss or gradient on any rank. Collective.

    Args:
        name: of the variant whose results they are.
        reference: the one whose results are expected.
        tolerance: largest error that is accepted; 0 for equality to the bit.

    Raises:
        WrongResultError: it is above ``tolerance``.
    """
    parameter, error = worst(relative_errors(results, expected))
    everywhere = torch.tensor(error, dtype=torch.float64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    if not everywhere.item() <= tolerance:
        raise WrongResultError(
            f"{name} differs from {reference} by {everywhere.item():.1e} of the norm, more than {tolerance:.0e}; on "
            f"this rank most in {parameter}: {error:.1e}"
        )
    return everywhere.item()


class CpuWatch(disturbance.CpuWatch):
    """From now on watches what else runs on the cores. Collective."""

    def seen(self, what: str) -> dict[str, Any]:
        """What was seen since then, said on rank 0 and for the JSON file. Collective.

        Args:
            what: that was measured meanwhile.
        """
        elapsed_s, found = time.monotonic() - self._start_s, self.found()
        say(f"  {what}: {elapsed_s:.0f} s; {'DISTURBED: ' if found.is_disturbed else ''}{found}")
        return {**asdict(found), "is_disturbed": found.is_disturbed}

    def _own_cpu_s(self) -> float:
        """CPU time that all ranks, and processes of theirs that have ended, used so far. Collective."""
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = torch.tensor(sum(usage.ru_utime + usage.ru_stime for usage in usages), dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

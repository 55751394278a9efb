"""All variants of a case, in turns of a few steps, on one link."""

import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.auto.cases import AUTO, FIXED, KEPT, SAME, VARIANTS, Case, Variant
from benchmarks.auto.start import START_STEPS, checkpoint, resumed
from benchmarks.auto.summary import largest_difference
from benchmarks.demo.folder import REPOSITORY, Folder
from benchmarks.demo.job import Job
from benchmarks.demo.links.link import FREE_BPS, Link
from benchmarks.demo.steps import RankStep, Step, medians
from benchmarks.demo.training_log.training_process import say
from benchmarks.harness.namespaces import NUM_NODES
from benchmarks.harness.rate import RateSearch
from megatron_lancet.errors import UsageError

TURN_STEPS = 3
"""Steps of a variant before the next one has its turn; the first of them is not measured."""
_RATE_TURNS, _RATE_STEPS = 5, 5
"""Turns in which the link gets its rate, and the reference's steps in each; the first of them is not measured."""
MAX_TUNING_STEPS = 360
SEGMENT_STEPS = 15
"""Steps of a tuning between two turns of the fixed plans."""
_LEFT_BYTES = 5e9
"""What the next variant's first steps may take."""
SAMPLES_PER_RANK = 4
MAX_LOSS_DIFFERENCE = 1e-2
"""Losses of other orders of sums differed by 2e-7 in 50 steps and by up to 3e-3 in 120, in fp32; losses of two runs of
our plans by 1e-4 in 120. Rounding can change the route of a token. Wrong gradients differ by far more."""
_NUM_STEPS = 10_000
"""More than are run: the ranks end when their parent ends them."""
MODEL_FLAGS = (
    "--num-layers 3 --hidden-size 256 --ffn-hidden-size 576 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --init-method-std 0.04 --moe-router-load-balancing-type aux_loss "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--expert-model-parallel-size 2"
)
TRAINING_FLAGS = (
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant "
    "--clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 --split 99,1,0 --eval-iters 0 --log-interval 1 "
    "--num-workers 0"
)
_TE_FLAGS = ["--transformer-impl", "transformer_engine", "--moe-grouped-gemm", "--bf16"]
SAMPLE_FIELDS = ("step_ms", "waited_ms", "reduced_ms", "loss")


def training_flags(folder: Folder, case: Case, num_steps: int = _NUM_STEPS) -> list[str]:
    """Megatron's flags of all variants of a case."""
    batch = SAMPLES_PER_RANK * NUM_NODES * case.micro_batches
    return [
        *f"{MODEL_FLAGS} {TRAINING_FLAGS}".split(),
        *("--num-experts", str(case.experts), "--moe-router-topk", str(case.topk)),
        *("--micro-batch-size", str(SAMPLES_PER_RANK), "--global-batch-size", str(batch)),
        *("--train-iters", str(num_steps), "--eval-interval", str(_NUM_STEPS + 1)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder.tokenizer)),
        *("--data-path", str(folder.dataset), "--data-cache-path", str(folder.cache)),
        *(_TE_FLAGS if case.te else ()),
    ]


class Running:
    """A variant that trains.

    Attributes:
        variant: what it runs.
        first_step: number of its first step.
        steps: all its steps so far, in order.
        tuning: the first of them, in which it chose its plan; empty without a choice. Their time includes the links'
            measurement and the planning after a step.
        beside: per turn beside a tuning, the steps whose times count.
        measured: per turn, the steps whose times count.
    """

    def __init__(self, variant: Variant, job: Job, first_step: int = 1) -> None:
        self.variant = variant
        self.job = job
        self.first_step = first_step
        self.steps: list[Step] = []
        self.tuning: list[Step] = []
        self.beside: list[list[Step]] = []
        self.measured: list[list[Step]] = []

    def run(self, num_steps: int) -> list[Step]:
        """Runs the next steps."""
        start = self.first_step + len(self.steps)
        self.job.run(range(start, start + num_steps), self._done)
        return self.steps[-num_steps:]

    def settle(self, fixed: Sequence["Running"] = ()) -> None:
        """Runs until the final plan is chosen.

        Args:
            fixed: variants that have a turn before the first step and after every :data:`SEGMENT_STEPS` steps. The
                machine's speed drifts, so the tuning is counted in steps of these turns.

        Raises:
            UsageError: it is not after :data:`MAX_TUNING_STEPS`.
        """
        if self._is_settled():
            return
        _turns_beside(fixed)
        while not self._is_settled():
            if len(self.steps) >= MAX_TUNING_STEPS:
                raise UsageError(f"{self.variant.name} has no plan after {MAX_TUNING_STEPS} steps: {self.job.log}")
            for _ in range(SEGMENT_STEPS // TURN_STEPS):
                if not self._is_settled():
                    self.run(TURN_STEPS)
            _turns_beside(fixed)
        self.tuning = list(self.steps)

    def turn(self) -> None:
        """Runs a measured turn."""
        self.measured.append(self.run(TURN_STEPS)[1:])

    def _done(self, number: int, ranks: Sequence[RankStep]) -> None:
        del number
        self.steps.append(Step(ranks))

    def _is_settled(self) -> bool:
        return bool(self.steps) and all(rank.is_settled for rank in self.steps[-1].ranks)

    def record(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "plan": self.steps[-1].ranks[0].plan,
            "whole_tuning_ms": [round(step.whole_ms, 2) for step in self.tuning],
            "beside_ms": [[round(step.whole_ms, 2) for step in turn] for turn in self.beside],
            "losses": [step.loss for step in self.steps],
            "samples": [[_sample(step) for step in turn] for turn in self.measured],
            "lines": lines_about_plans(self.job.log) if self.variant.name in (AUTO, KEPT) else [],
        }


def _turns_beside(fixed: Sequence[Running]) -> None:
    for one in fixed:
        one.beside.append(one.run(TURN_STEPS)[1:])


def _sample(step: Step) -> list[float]:
    return [round(getattr(step, field), 4) for field in SAMPLE_FIELDS]


def lines_about_plans(log: Path) -> list[str]:
    """What a run printed about its plans, without times of day."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if re.match(r"Megatron-Lancet (plan|tuning|auto|race)", line)]


def run_case(case: Case, folder: Folder, link: Link, num_turns: int, logs: Path) -> dict[str, Any]:
    """Trains all variants of a case, and returns what they took, for the result file.

    Raises:
        UsageError: a training failed.
    """
    common = training_flags(folder, case)
    profiles = logs / f"{case.name}-profiles"
    shutil.rmtree(profiles, ignore_errors=True)
    common += ["--lancet-cache", str(profiles), *resumed(_start(case, folder, link, logs))]
    with ExitStack() as stack:

        def start(variant: Variant) -> Running:
            options = [*variant.options, *_options(case)]
            log = logs / f"{case.name}-{variant.name}.log"
            log.unlink(missing_ok=True)
            flags = [*common, *case.flags_of(variant)]
            job = Job(variant.name, link, flags, log, options=options, ranks_per_node=case.ranks_per_node)
            return Running(variant, stack.enter_context(job), START_STEPS + 1)

        def start_all(variants: Sequence[Variant]) -> list[Running]:
            started = []
            for variant in variants:
                started.append(start(variant))
                started[-1].job.wait_until_ready()
            return started

        link.set_rate(FREE_BPS)
        reference, *others = start_all([one for one in case.variants if one.name not in (AUTO, KEPT)])
        rate_bps = set_rate(reference, others, case.share, link)
        fixed = [one for one in others if one.variant.name in FIXED]
        others += start_all([one for one in case.variants if one.name in (AUTO, KEPT)])
        for one in others:
            _check_memory(len(others) + 1)
            say(f"      {one.variant.name}: first steps")
            one.settle(fixed if one.variant.name == AUTO else ())
        by_name = {one.variant.name: one for one in (reference, *others)}
        running = [by_name[variant.name] for variant in case.variants]
        catch_up(reference, others, rate_bps, link)
        _check_losses(by_name)  # before the turns, which take most of the time
        turns(running, num_turns)
        _check_losses(by_name)
        return {
            "name": case.name,
            "share": case.share,
            "rate_bps": rate_bps,
            "micro_batches": case.micro_batches,
            "start_steps": START_STEPS,
            "segment_steps": SEGMENT_STEPS,
            "flags": [flag.removeprefix(f"{REPOSITORY}/") for flag in (*common, *case.flags)],
            "sample_fields": list(SAMPLE_FIELDS),
            "variants": {one.variant.name: one.record() for one in running},
        }


def catch_up(reference: Running, others: Sequence[Running], rate_bps: float, link: Link) -> None:
    """Runs the reference on a free link until no other has more steps: each loss then has one to compare with."""
    num_missing = max(len(one.steps) for one in others) - len(reference.steps)
    if num_missing > 0:
        say(f"      {num_missing} more steps of {reference.variant.name}, to compare losses with")
        link.set_rate(FREE_BPS)
        reference.run(num_missing)
        link.set_rate(rate_bps)


def _check_losses(running: Mapping[str, Running]) -> None:
    """
    Raises:
        UsageError: a variant's losses are not the reference's, or it has more of them.
    """
    reference = [step.loss for step in running[SAME].steps]
    for name, one in running.items():
        if len(one.steps) > len(reference):
            raise UsageError(f"{name} has {len(one.steps)} losses, and {SAME} has {len(reference)} to compare with.")
        found = largest_difference(reference, [step.loss for step in one.steps])
        if found > MAX_LOSS_DIFFERENCE:
            raise UsageError(
                f"a loss of {name} differs from {SAME}'s by {found:.1e} of it, and {MAX_LOSS_DIFFERENCE} is allowed: "
                "these trainings can't be compared."
            )


def _options(case: Case) -> list[str]:
    return ["--te"] if case.te else []


def _start(case: Case, folder: Folder, link: Link, logs: Path) -> Path:
    flags = training_flags(folder, replace(case, micro_batches=1), START_STEPS)
    start = partial(Job, "start", link, options=_options(case), ranks_per_node=case.ranks_per_node)
    link.set_rate(FREE_BPS)
    data = folder.prepared.read_text()
    return checkpoint(start, [*flags, *case.flags_of(VARIANTS[SAME])], data, folder.root / "starts", logs)


def turns(running: Sequence[Running], number: int) -> None:
    """Lets each variant have a number of measured turns, the first of them another variant each time."""
    for turn in range(number):
        first = turn % len(running)
        for one in (*running[first:], *running[:first]):
            one.turn()
        say(f"      turn {turn + 1} of {number}: {_steps_text(running)}")


def _check_memory(num_variants: int) -> None:
    """Refuses to go on where memory is nearly full: Linux then drops the programs' own pages, and a step takes minutes.

    Raises:
        UsageError: less than :data:`_LEFT_BYTES` is left.
    """
    left = psutil.virtual_memory().available
    if left < _LEFT_BYTES:
        raise UsageError(
            f"the trainings of {num_variants} variants fill the memory of this machine: {left / 1e9:.1f} GB are left, "
            f"and {_LEFT_BYTES / 1e9:.0f} GB are needed. Choose some of the variants by --variants."
        )


def set_rate(reference: Running, others: Sequence[Running], share: float, link: Link) -> float:
    """Sets the link's rate so that the reference waits for a share of its step; returns bits per second.

    The other variants have their turns in between, so that caches and memory are as in the measured turns. The share
    may still change by a few points before these.
    """
    steps = reference.run(_RATE_STEPS)[1:]
    free = medians(steps)
    search = RateSearch(share, free.step_ms - free.waited_ms, free.waited_ms, steps[0].sent_bytes)
    for _ in range(_RATE_TURNS):
        link.set_rate(search.rate_bps)
        for other in others:
            other.run(TURN_STEPS)
        steps = reference.run(_RATE_STEPS)[1:]
        waited_ms = statistics.median(step.waited_ms for step in steps)
        compute_ms = statistics.median(step.step_ms - step.waited_ms for step in steps)
        say(f"      {search.rate_bps / 1e6:.0f} Mbit/s: stock waits {waited_ms / (waited_ms + compute_ms):.0%}")
        if not search.correct(waited_ms, waited_ms + compute_ms):
            break
    link.set_rate(search.rate_bps)
    return search.rate_bps


def _steps_text(running: Sequence[Running]) -> str:
    def text(one: Running) -> str:
        found = medians(one.measured[-1])
        return f"{one.variant.name} {found.step_ms:.0f} ms, waits {found.waited_ms / found.step_ms:.0%}"

    return "; ".join(text(one) for one in running)

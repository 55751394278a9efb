"""Both trainings of the short demo, in turns of a few steps, on one link."""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.demo.display import Display
from benchmarks.demo.folder import Folder
from benchmarks.demo.job import Job
from benchmarks.demo.links.link import Link
from benchmarks.demo.steps import OURS, STOCK, Comparison, RankStep, Step, medians
from benchmarks.harness.namespaces import NUM_NODES
from benchmarks.harness.rate import RateSearch
from megatron_lancet.errors import UsageError

EXPOSED_SHARE = 0.45
"""Part of its step for which stock is to wait: it sets the link's rate."""
TURN_STEPS = 4
"""Steps of one variant before the other has its turn."""
_RECENT_STEPS = 2 * TURN_STEPS
"""Steps of stock by which the link's rate is corrected. Routing is most uneven in the first steps of a training, and
then ranks wait for each other as well."""
_NUM_WARM_UP = 2
"""Unmeasured steps of a process that has just started."""
SAMPLES_PER_RANK = 4
# A row of a message takes CPU time from the core that a rank has, and a chunk one more launch of each op: wide experts
# and long samples keep both a small part of the step.
MODEL_FLAGS = (
    "--num-layers 3 --hidden-size 256 --ffn-hidden-size 576 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --init-method-std 0.04 --num-experts 4 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--expert-model-parallel-size 2"
)
TRAINING_FLAGS = (
    "--attention-dropout 0 --hidden-dropout 0 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.08 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 "
    "--split 95,5,0 --eval-iters 4 --log-interval 1 --num-workers 0"
)
# Chunks along the batch keep Megatron's core attention. Chunks along the sequence need torch's fused kernel, which
# skips scores of later positions: stock would then have to run it too.
PLAN_FLAGS = {STOCK: ("--lancet-plan", "off"), OURS: ("--lancet-num-chunks", "2", "--lancet-chunk-dim", "batch")}


def training_flags(folder: Folder, num_steps: int, extra: Sequence[str]) -> list[str]:
    """Megatron's flags of both variants: one run with one schedule."""
    return [
        *f"{MODEL_FLAGS} {TRAINING_FLAGS}".split(),
        *("--micro-batch-size", str(SAMPLES_PER_RANK), "--global-batch-size", str(SAMPLES_PER_RANK * NUM_NODES)),
        *("--train-iters", str(num_steps), "--lr-decay-iters", str(num_steps)),
        # No evaluation or checkpoint in between; Megatron does both at the end anyway.
        *("--eval-interval", str(num_steps + 1), "--save-interval", str(num_steps)),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder.tokenizer)),
        *("--data-path", str(folder.dataset), "--data-cache-path", str(folder.cache), *extra),
    ]


def turns(num_steps: int, middle: int) -> list[range]:
    """The steps of each turn; one ends with the step ``middle``, after which ours is resumed."""
    ends = sorted({*range(TURN_STEPS, num_steps, TURN_STEPS), middle, num_steps})
    return [range(start + 1, end + 1) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def unmeasured_steps(middle: int) -> list[int]:
    """Steps whose times don't count: in the first half the link gets its rate, and then ours starts anew."""
    return [*range(1, middle + 1 + _NUM_WARM_UP)]


def common_attention(stock: str, ours: str) -> str:
    """Returns the class of both variants' core attention.

    Raises:
        UsageError: they differ.
    """
    if stock != ours:
        raise UsageError(
            f"stock runs {stock} and ours {ours}: times with different attention kernels can't be compared. Drop the "
            "flags after -- that choose one, or pass --lancet-attention sdpa there for both."
        )
    return stock


class Training:
    """Both variants, step by step.

    Attributes:
        rate_bps: rate of the link in bits per second.
        attention: class of both variants' core attention.
        comparison: their steps.
    """

    def __init__(
        self, folder: Folder, found: Link, num_steps: int, rate_bps: float | None, extra: Sequence[str]
    ) -> None:
        """
        Args:
            found: the link between the ranks.
            rate_bps: its rate, in bits per second; None to set it by what stock waits.
            extra: further flags of Megatron.
        """
        self._folder = folder
        self._link = found
        self._num_steps = num_steps
        self._middle = num_steps // 2
        self._wanted_bps = rate_bps
        self._search: RateSearch | None = None
        self._skews_ms: list[float] = []
        """What stock's steps since the first turn waited beyond their bytes' time on the wire."""
        self.rate_bps = 0.0
        self.attention = ""
        self.comparison = Comparison(unmeasured_steps(self._middle))
        self._display = Display(self.comparison, num_steps)
        flags = training_flags(folder, num_steps, extra)
        keep = ["--save", str(folder.checkpoints)]
        resume = [
            "--load",
            str(folder.checkpoints),
            "--exit-on-missing-checkpoint",
            "--lancet-report",
            str(folder.root),
        ]
        self._flags = {
            "stock": [*flags, *PLAN_FLAGS[STOCK]],
            "ours": [*flags, *PLAN_FLAGS[OURS], *keep, "--exit-interval", str(self._middle)],
            "ours, resumed": [*flags, *PLAN_FLAGS[OURS], *keep, *resume],
        }

    def run(self) -> None:
        """Trains both to the end.

        Raises:
            UsageError: a training failed, or the variants have different attention kernels.
        """
        with ExitStack() as stack:
            stock = stack.enter_context(self._start("stock"))
            ours = stack.enter_context(self._start("ours"))  # both start at the same time
            self.attention = common_attention(stock.wait_until_ready(), ours.wait_until_ready())
            for steps in turns(self._num_steps, self._middle):
                stock.run(steps, lambda number, ranks: self._done(STOCK, number, ranks))
                if steps[0] == 1:
                    self._set_first_rate()
                ours.run(steps, lambda number, ranks: self._done(OURS, number, ranks))
                self._display.turn(steps)
                if TURN_STEPS < steps[-1] <= self._middle:
                    self._correct_rate()
                if steps[-1] == self._middle:
                    self._display.say(f"[5/8] checkpoint of ours at step {self._middle}, and resume from it")
                    ours.finish()
                    ours = stack.enter_context(self._start("ours, resumed"))
                    ours.wait_until_ready()
            self._display.say("[6/8] final checkpoint and validation loss")
            stock.finish()
            ours.finish()

    def _start(self, name: str) -> Job:
        log = self._folder.stock_log if name == "stock" else self._folder.train_log
        traced = [
            number for number in range(self._middle, self._num_steps + 1) if number % TURN_STEPS == TURN_STEPS - 1
        ]
        return Job(name, self._link, self._flags[name], log, traced)

    def _done(self, variant: str, number: int, ranks: Sequence[RankStep]) -> None:
        self.comparison.add(variant, number, Step(ranks))
        self._display.step()

    def _set_first_rate(self) -> None:
        """After the first turn of stock, over a link that is hardly waited for."""
        if self._wanted_bps is not None:
            self._set_rate(self._wanted_bps)
            return
        steps = list(self.comparison.steps[STOCK].values())[1:]
        found = medians(steps)
        free_ms = found.waited_ms
        self._search = RateSearch(EXPOSED_SHARE, found.step_ms - free_ms, free_ms, steps[0].sent_bytes)
        self._set_rate(self._search.rate_bps)

    def _correct_rate(self) -> None:
        if self._search is None:
            return
        steps = list(self.comparison.steps[STOCK].values())[TURN_STEPS:]
        new = steps[len(self._skews_ms) :]
        self._skews_ms += [step.waited_ms - self._search.wire_ms for step in new]
        compute_ms = statistics.median(step.step_ms - step.waited_ms for step in steps)
        waited_ms = statistics.median(self._skews_ms[-_RECENT_STEPS:]) + self._search.wire_ms
        if self._search.correct(waited_ms, compute_ms + waited_ms):
            self._set_rate(self._search.rate_bps)

    def _set_rate(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self._link.set_rate(rate_bps)
        self._display.say(f"      the link carries {rate_bps / 1e6:.0f} Mbit/s from here on")

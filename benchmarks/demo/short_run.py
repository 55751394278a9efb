"""Trains the same small model stock and ours, in turns, on a link that is really waited for, and shows both.

The model, the data and the steps are the same; stock runs Megatron's own modules (``--lancet-plan off``), ours two
chunks. Ours saves a checkpoint in the middle, ends, and is resumed from it; stock runs through. The rate of the link is
set so that stock waits for a given share of its step on this machine.
"""

import json
import resource
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.demo.data import prepare, write_sample
from benchmarks.demo.display import Display
from benchmarks.demo.folder import Folder, open_folder, shown, write_json
from benchmarks.demo.job import Job
from benchmarks.demo.link import Link, link, rank_cores
from benchmarks.demo.steps import OURS, STOCK, Comparison, RankStep, Step, medians, sentence
from benchmarks.harness.disturbance import cpu_times, disturbance
from benchmarks.harness.namespaces import NUM_NODES
from benchmarks.harness.origin import origin
from benchmarks.harness.rate import RateSearch
from megatron_lancet.cli.training_process import say
from megatron_lancet.errors import UsageError
from megatron_lancet.report.train_log import RunLog, results_text, tail

EXPOSED_SHARE = 0.45
"""Part of its step for which stock is to wait: it sets the link's rate."""
TURN_STEPS = 4
"""Steps of one variant before the other has its turn."""
NUM_UNMEASURED = 2 * TURN_STEPS
"""In the first turn the link has no rate yet, after the second one its rate is corrected."""
_NUM_WARM_UP = 2
"""Unmeasured steps of a process that has just started."""
LOSS_TOLERANCE = 1e-4
"""A larger difference of losses is an error: sums in another order differ by 1e-7, which training then multiplies."""

SAMPLES_PER_RANK = 8
MODEL_FLAGS = (
    "--num-layers 3 --hidden-size 256 --ffn-hidden-size 352 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --init-method-std 0.04 --num-experts 4 --moe-router-topk 2 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--expert-model-parallel-size 2"
)
TRAINING_FLAGS = (
    "--attention-dropout 0 --hidden-dropout 0 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.08 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95 "
    "--split 95,5,0 --eval-iters 4 --log-interval 1 --num-workers 0"
)
PLAN_FLAGS = {STOCK: ("--lancet-plan", "off"), OURS: ("--lancet-num-chunks", "2")}


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
    """Steps whose times don't count."""
    return [*range(1, NUM_UNMEASURED + 1), *range(middle + 1, middle + 1 + _NUM_WARM_UP)]


class Training:
    """Both variants, step by step."""

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
        self.rate_bps = 0.0
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
            UsageError: a training failed.
        """
        with ExitStack() as stack:
            stock = stack.enter_context(self._start("stock"))
            ours = stack.enter_context(self._start("ours"))
            for steps in turns(self._num_steps, self._middle):
                stock.run(steps, lambda number, ranks: self._done(STOCK, number, ranks))
                if steps[0] == 1:
                    self._set_first_rate()
                ours.run(steps, lambda number, ranks: self._done(OURS, number, ranks))
                self._display.turn(steps)
                if steps[-1] == NUM_UNMEASURED:
                    self._correct_rate()
                if steps[-1] == self._middle:
                    self._display.say(f"[5/8] checkpoint of ours at step {self._middle}, and resume from it")
                    ours.finish()
                    ours = stack.enter_context(self._start("ours, resumed"))
            self._display.say("[6/8] final checkpoint and validation loss")
            stock.finish()
            ours.finish()

    def _start(self, name: str) -> Job:
        log = self._folder.stock_log if name == "stock" else self._folder.train_log
        traced = [
            number for number in range(NUM_UNMEASURED, self._num_steps + 1) if number % TURN_STEPS == TURN_STEPS - 1
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
        found = medians(list(self.comparison.steps[STOCK].values())[-TURN_STEPS:])
        if self._search.correct(found.waited_ms, found.step_ms):
            self._set_rate(self._search.rate_bps)

    def _set_rate(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self._link.set_rate(rate_bps)
        self._display.say(f"      the link carries {rate_bps / 1e6:.0f} Mbit/s from here on")


class CpuWatch:
    """From now on watches what else runs on the ranks' cores; processes that we start count when they have ended."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = sorted(set(cores))
        self._own_s = _cpu_s_of_children()
        self._before, self._start_s = cpu_times(self._cores), time.monotonic()

    def seen(self) -> str | None:
        """What was seen since then; None if the cores were ours alone."""
        elapsed_s, after = time.monotonic() - self._start_s, cpu_times(self._cores)
        own_s = _cpu_s_of_children() - self._own_s
        found = disturbance(self._before, after, own_s, elapsed_s, len(self._cores))
        return str(found) if found.is_disturbed else None


def _cpu_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_short(
    root: Path,
    num_steps: int,
    vocab_size: int,
    corpus_megabytes: float | None,
    link_kind: str,
    rate_bps: float | None,
    is_unprivileged: bool,
    extra: Sequence[str],
) -> None:
    """Runs the short demo.

    Args:
        root: output folder.
        link_kind: see :func:`benchmarks.demo.link.link`.
        rate_bps: of the link, in bits per second; None to set it by what stock waits.
        extra: further flags of Megatron, for both variants.

    Raises:
        UsageError: the folder or the machine can't be used, a training failed, or the losses are not equal.
    """
    start_s = time.monotonic()
    folder = open_folder(root)
    prepared = prepare(folder, vocab_size, corpus_megabytes)
    entropy = prepared["unigram_entropy"]
    say(f"      {prepared['num_tokens'] / 1e6:.2f} million tokens, unigram entropy {entropy:.3f} nats per token")
    train_start_s = time.monotonic()
    watch = CpuWatch(rank_cores())
    with link(link_kind, is_unprivileged) as found:
        say(f"[4/8] training, stock and ours in turns, {num_steps} steps of each; {NUM_NODES} CPU ranks for each")
        say(f"      {found.description}")
        training = Training(folder, found, num_steps, rate_bps, extra)
        training.run()
    summary = {
        **results_of(folder, training.comparison, num_steps),
        "unigram_entropy": entropy,
        "link": f"{found.kind}, {training.rate_bps / 1e6:.0f} Mbit/s",
        "other_load": watch.seen(),
        "origin": origin("benchmarks.demo"),
        "train_seconds": round(time.monotonic() - train_start_s, 1),
    }
    say("[7/8] sample from the trained model")
    summary["sample"] = write_sample(folder)
    say(textwrap.indent(summary["sample"]["prompt"] + summary["sample"]["text"], "      | "))
    say("[8/8] picture of both steps, loss curve and summary")
    write_pictures(folder, training.comparison, summary, num_steps)
    summary["seconds"] = round(time.monotonic() - start_s, 1)
    write_json(summary, folder.summary)
    say(closing_text(folder, summary))


def results_of(folder: Folder, comparison: Comparison, num_steps: int) -> dict[str, Any]:
    """The results of both trainings for summary.json.

    Raises:
        UsageError: a log is not that of one continued run, or the losses are not equal.
    """
    logs = {STOCK: folder.stock_log, OURS: folder.train_log}
    runs = {variant: run_of(log) for variant, log in logs.items()}
    for variant, run in runs.items():
        if not run.is_complete(num_steps):
            raise UsageError(
                f"expected steps 1 to {num_steps} of {variant} once each and then a validation loss; the log has "
                f"{len(run.iterations)} steps and {run.validation}. The end of {tail(logs[variant])}"
            )
    report = json.loads(folder.report.read_text())
    measured = comparison.summary()
    if not measured["max_loss_difference"] <= LOSS_TOLERANCE:
        raise UsageError(
            f"a loss of ours differs from stock's by {measured['max_loss_difference']:.1e} of it, more than "
            f"{LOSS_TOLERANCE:.0e}. The overlap has changed the training: please report this, with {folder.root}."
        )
    validation = runs[STOCK].validation
    assert validation is not None
    return {**runs[OURS].results(report), **measured, "stock_validation_loss": validation.lm_loss}


def run_of(log: Path) -> RunLog:
    """The steps and the validation loss in a log."""
    run = RunLog()
    for line in log.read_text(errors="replace").splitlines():
        run.feed(line)
    return run


def write_pictures(folder: Folder, comparison: Comparison, summary: dict[str, Any], num_steps: int) -> None:
    """Writes both timelines above each other, and the loss curve of ours."""
    from benchmarks.demo.picture import write_picture  # matplotlib is slow to import
    from megatron_lancet.report.loss_curve import LossCurve, write_png

    stock, ours = comparison.typical(STOCK), comparison.typical(OURS)
    if stock is not None and ours is not None:
        write_picture(stock, ours, summary, folder.timelines)
    num_tokens = comparison.steps[OURS][1].ranks[0].num_tokens
    title = "GPT-MoE on the sources of Python's standard library, two chunks"
    curve = LossCurve(title, run_of(folder.train_log), num_tokens, num_steps // 2, summary["unigram_entropy"])
    write_png(curve, folder.picture)


def closing_text(folder: Folder, summary: dict[str, Any]) -> str:
    """The last lines of the demo."""
    files = {
        "both steps": folder.timelines,
        "loss curve": folder.picture,
        "summary": folder.summary,
        "logs": folder.train_log,
    }
    lines = [
        results_text(summary),
        f"  stock              {summary['stock_step_ms']:.0f} ms a step, "
        f"{100 * summary['stock_exposed_ms'] / summary['stock_step_ms']:.1f} % of it waiting for all-to-alls",
        f"  link               {summary['link']}",
        *([f"  DISTURBED          {summary['other_load']}"] if summary["other_load"] else []),
        *(f"  {what:<18} {shown(path)}" for what, path in files.items() if path.exists()),
        "",
        sentence(summary),
    ]
    return "\n".join(lines)

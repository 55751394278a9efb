"""Trains the same small model stock and ours, in turns, on a link that is really waited for, and shows both.

The model, the data and the steps are the same; stock runs Megatron's own modules (``--lancet-plan off``), ours two
chunks. Ours saves a checkpoint in the middle, ends, and is resumed from it; stock runs through. The rate of the link is
set so that stock waits for a given share of its step on this machine.
"""

import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.claim import closing_text, files_of
from benchmarks.demo.data import prepare, write_sample
from benchmarks.demo.folder import Folder, open_folder, shown, write_json
from benchmarks.demo.links.link import link, rank_cores
from benchmarks.demo.steps import OURS, STOCK, Comparison
from benchmarks.demo.training import EXPOSED_SHARE, Training
from benchmarks.demo.training_log.train_log import RunLog, tail
from benchmarks.demo.training_log.training_process import say
from benchmarks.harness.disturbance import CpuWatch
from benchmarks.harness.namespaces import NUM_NODES
from benchmarks.harness.origin import finished, origin
from benchmarks.harness.ranks import rank_environment
from megatron_lancet.errors import UsageError

LOSS_TOLERANCE = 1e-3
"""A larger relative difference of losses is an error.

Sums in another order differ by 1e-7. Where a token's two best experts are nearly equal, that decides between them, and
training multiplies the difference: from step 33 on, stock on an Intel Xeon and stock on an AMD EPYC are up to 1.4e-4
apart.
"""


def run_short(
    root: Path,
    num_steps: int,
    vocab_size: int,
    corpus_megabytes: float | None,
    *,
    link_kind: str,
    rate_bps: float | None,
    is_unprivileged: bool,
    extra: Sequence[str],
) -> None:
    """Runs the short demo.

    Args:
        root: output folder.
        link_kind: see :func:`benchmarks.demo.links.link.link`.
        rate_bps: of the link, in bits per second; None to set it by what stock waits.
        extra: further flags of Megatron, for both variants.

    Raises:
        UsageError: the folder or the machine can't be used, a training failed, or the losses are not equal.
    """
    start_s = time.monotonic()
    # Recorded at the start: the commit may change during the run.
    started = origin("benchmarks.demo", environment=rank_environment(0))
    folder = open_folder(root)
    prepared = prepare(folder, vocab_size, corpus_megabytes)
    entropy = prepared["unigram_entropy"]
    say(f"      {prepared['num_tokens'] / 1e6:.2f} million tokens, unigram entropy {entropy:.3f} nats per token")
    train_start_s = time.monotonic()
    watch = CpuWatch(rank_cores())
    with link(link_kind, is_unprivileged) as found:
        say(f"[4/8] training, stock and ours in turns, {num_steps} steps of each; {NUM_NODES} CPU ranks of each start")
        say(f"      {found.description}")
        training = Training(folder, found, num_steps, rate_bps, extra)
        training.run()
    other_load = watch.found()
    summary = {
        **results_of(folder, training.comparison, num_steps),
        "unigram_entropy": entropy,
        "link": f"{found.kind}, {training.rate_bps / 1e6:.0f} Mbit/s",
        "wanted_share": EXPOSED_SHARE if rate_bps is None else None,
        "attention": training.attention,
        "other_load": str(other_load) if other_load.is_disturbed else None,
        "origin": finished(started),
        "train_seconds": round(time.monotonic() - train_start_s, 1),
    }
    say("[7/8] sample from the trained model")
    summary["sample"] = write_sample(folder)
    say(textwrap.indent(summary["sample"]["prompt"] + summary["sample"]["text"], "      | "))
    say("[8/8] picture of both steps, loss curve and summary")
    write_pictures(folder, training.comparison, summary, num_steps)
    summary["seconds"] = round(time.monotonic() - start_s, 1)
    write_json(summary, folder.summary)
    say(closing_text(summary, {what: shown(path) for what, path in files_of(folder).items() if path.exists()}))


def results_of(folder: Folder, comparison: Comparison, num_steps: int) -> dict[str, Any]:
    """The results of both trainings for summary.json.

    Raises:
        UsageError: a log does not show one continued run, or the losses are not equal.
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
    from benchmarks.demo.training_log.loss_curve import LossCurve, write_png

    stock, ours = comparison.typical(STOCK), comparison.typical(OURS)
    if stock is not None and ours is not None:
        write_picture(stock, ours, summary, folder.timelines)
    num_tokens = comparison.steps[OURS][1].ranks[0].num_tokens
    title = "GPT-MoE on the sources of Python's standard library, two chunks"
    curve = LossCurve(title, run_of(folder.train_log), num_tokens, num_steps // 2, summary["unigram_entropy"])
    write_png(curve, folder.picture)

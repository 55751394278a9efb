"""Runs a training as a child process and shows its progress."""

import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from subprocess import PIPE, STDOUT, Popen

from tqdm import tqdm

from benchmarks.demo.training_log.train_log import Iteration

_LINE_EVERY_ITERATIONS = 25
"""Steps between two progress lines without a terminal."""

_SPEED_SPAN = 20
"""Steps over which the speed shown during training is averaged."""

_STOP_GRACE_S = 45.0
"""torchrun gives its ranks 30 s to end before it kills them."""


def say(line: str) -> None:
    """Prints a line, above the bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Progress:
    """Shows a bar over all training steps or, without a terminal, a plain line now and then."""

    def __init__(self, num_iterations: int, tokens_per_iteration: int) -> None:
        self._tokens = tokens_per_iteration
        self._recent_ms: deque[float] = deque(maxlen=_SPEED_SPAN)
        shape = dict(zip(("ncols", "nrows"), shutil.get_terminal_size(), strict=True))  # to tqdm, unknown is 0
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self._bar = tqdm(total=num_iterations, desc="train", bar_format=form, disable=None, **shape)

    def step(self, iteration: Iteration) -> None:
        """Shows a finished training step."""
        self._recent_ms.append(iteration.step_ms)
        tokens_per_s = self._tokens / fmean(self._recent_ms) * 1e3
        figures = f"lm loss {iteration.lm_loss:.3f}, {tokens_per_s:.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update()
        elif iteration.number % _LINE_EVERY_ITERATIONS == 0 or iteration.number in (1, iteration.total):
            say(f"      iteration {iteration.number:4d}/{iteration.total}: {figures}")

    def close(self) -> None:
        """Ends the bar and keeps it on the screen."""
        self._bar.close()


@contextmanager
def running(command: Sequence[str], environment: dict[str, str]) -> Iterator[Popen[str]]:
    """Starts a child process with readable output; ends it and its ranks when the block ends for any reason."""
    # In a session of its own the launcher does not get Ctrl-C, only the SIGTERM below, which it passes to its ranks.
    process = Popen(
        command, env=environment, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

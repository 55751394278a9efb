"""A training as a child process, and what the user sees of it."""

import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from subprocess import PIPE, STDOUT, Popen

from tqdm import tqdm

from megatron_lancet.report.train_log import Iteration

_LINE_EVERY_ITERATIONS = 25
"""Between two lines of progress where there is no terminal for a bar."""

_SPEED_SPAN = 20
"""Steps over which the speed shown during training is averaged."""

_STOP_GRACE_S = 45.0
"""torchrun gives its ranks 30 s to end before it kills them."""


def say(line: str) -> None:
    """Print a line, above the bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Progress:
    """A bar over all training steps, or a plain line now and then where no terminal shows a bar."""

    def __init__(self, num_iterations: int, tokens_per_iteration: int) -> None:
        self._tokens = tokens_per_iteration
        self._recent_ms: deque[float] = deque(maxlen=_SPEED_SPAN)
        shape = dict(zip(("ncols", "nrows"), shutil.get_terminal_size(), strict=True))  # to tqdm, unknown is 0
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self._bar = tqdm(total=num_iterations, desc="train", bar_format=form, disable=None, **shape)

    def step(self, iteration: Iteration) -> None:
        """Show a finished training step."""
        self._recent_ms.append(iteration.step_ms)
        tokens_per_s = self._tokens / fmean(self._recent_ms) * 1e3
        figures = f"lm loss {iteration.lm_loss:.3f}, {tokens_per_s:.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update()
        elif iteration.number % _LINE_EVERY_ITERATIONS == 0 or iteration.number in (1, iteration.total):
            say(f"      iteration {iteration.number:4d}/{iteration.total}: {figures}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


@contextmanager
def running(command: Sequence[str], environment: dict[str, str]) -> Iterator[Popen[str]]:
    """A child process with its output to read; whatever ends the block, it and its ranks end too."""
    # In a session of its own, Ctrl-C reaches the launcher only as the SIGTERM below, which it hands to its ranks.
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

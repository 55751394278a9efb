"""Shows both trainings while they run: a step of each to scale, redrawn in place; plain lines without a terminal."""

import os
import shutil
import sys
from typing import TextIO

from benchmarks.demo.steps import OURS, STOCK, Comparison, Medians, Step, medians

_MARKS, _ASCII_MARKS = "█░", "#."
"""Of compute and of waiting."""
_BLUE, _GREY, _PLAIN = "\x1b[38;5;32m", "\x1b[38;5;245m", "\x1b[0m"
_UP_AND_CLEAR = "\x1b[{}F\x1b[J"
_SPAN = 8
"""Steps over which the figures on the screen are medians."""
_TEXT_COLUMNS = 46
_MIN_COLUMNS = 70
"""In a narrower terminal the lines would wrap."""


class Display:
    """A few lines at the bottom of a terminal, or a plain line now and then."""

    def __init__(self, comparison: Comparison, num_steps: int, out: TextIO | None = None) -> None:
        """
        Args:
            comparison: what is shown.
            out: where to; standard output by default.
        """
        self._comparison = comparison
        self._num_steps = num_steps
        self._out = sys.stdout if out is None else out
        is_wide = shutil.get_terminal_size().columns >= _MIN_COLUMNS
        self._is_live = is_wide and self._out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        is_unicode = (self._out.encoding or "").lower().startswith("utf")
        self._marks = _MARKS if is_unicode else _ASCII_MARKS
        self._has_colours = self._is_live and not os.environ.get("NO_COLOR")
        self._num_drawn = 0

    def say(self, line: str) -> None:
        """Prints a line, above the figures if they are on the screen."""
        self._erase()
        print(line, file=self._out)
        self._draw()

    def step(self) -> None:
        """Shows that a step was done."""
        if self._is_live:
            self._erase()
            self._draw()

    def turn(self, steps: range) -> None:
        """Says what both variants needed for ``steps``, where the figures are not on the screen anyway."""
        if not self._is_live:
            both = [
                self._line(variant, [self._comparison.steps[variant][number] for number in steps])
                for variant in (STOCK, OURS)
            ]
            print(f"      steps {steps[0]:2d} to {steps[-1]:2d}: {both[0]} | {both[1]}", file=self._out, flush=True)

    @staticmethod
    def _line(variant: str, steps: list[Step]) -> str:
        found = medians(steps)
        return f"{variant} {found.step_ms:4.0f} ms, waits {found.waited_share:4.0%}, loss {steps[-1].loss:.5f}"

    def _erase(self) -> None:
        if self._num_drawn:
            self._out.write(_UP_AND_CLEAR.format(self._num_drawn))
            self._num_drawn = 0

    def _draw(self) -> None:
        if not self._is_live or not self._comparison.steps[STOCK]:
            return
        columns = shutil.get_terminal_size().columns - 1
        recent = {variant: list(steps.values())[-_SPAN:] for variant, steps in self._comparison.steps.items()}
        found = {variant: medians(steps) for variant, steps in recent.items() if steps}
        longest_ms = max(figures.step_ms for figures in found.values())
        lines = [""]
        for variant, figures in found.items():
            lines.append(self._row(variant, figures, recent[variant][-1].loss, longest_ms, columns))
        done = min(len(steps) for steps in self._comparison.steps.values())
        speedup = f", {found[STOCK].step_ms / found[OURS].step_ms:.2f} times as fast" if OURS in found else ""
        lines.append(f"      {done} of {self._num_steps} steps of each{speedup}"[:columns])
        self._out.write("\n".join(lines) + "\n")
        self._out.flush()
        self._num_drawn = len(lines)

    def _row(self, variant: str, figures: Medians, loss: float, longest_ms: float, columns: int) -> str:
        width = columns - _TEXT_COLUMNS
        length = round(width * figures.step_ms / longest_ms)
        waiting = round(length * figures.waited_share)
        bar = self._marks[0] * (length - waiting), self._marks[1] * waiting
        if self._has_colours:
            bar = f"{_BLUE}{bar[0]}", f"{_GREY}{bar[1]}{_PLAIN}"
        text = f"{figures.step_ms:5.0f} ms, waits {figures.waited_share:4.0%}, loss {loss:.4f}"
        return f"      {variant:<5} {''.join(bar)}{' ' * (width - length)} {text}"

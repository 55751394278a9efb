"""Draws docs/overlap.png, the picture of the idea: python docs/overlap_picture.py.

A sketch, not a measurement: one MoE layer, forward and backward, with made-up durations, laid out as the runtime does.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

COMPUTE, MESSAGES = 1, 0
COLOURS = {0: "#2f6fb0", 1: "#e08a2e", "dW": "#7a9e3b"}
WAITING = "#dddddd"


@dataclass(frozen=True)
class Box:
    """An op: lane, start, length, text, and the chunk (or dW) that gives its colour."""

    lane: int
    start: float
    length: float
    text: str
    owner: int | str


STOCK = [
    Box(COMPUTE, 0, 4, "attention", 0),
    Box(MESSAGES, 4, 4, "dispatch", 0),
    Box(COMPUTE, 8, 4, "experts", 0),
    Box(MESSAGES, 12, 4, "combine", 0),
    Box(COMPUTE, 16, 1, "", 0),
    Box(MESSAGES, 17, 4, "combine", 0),
    Box(COMPUTE, 21, 8, "experts dX, dW", 0),
    Box(MESSAGES, 29, 4, "dispatch", 0),
    Box(COMPUTE, 33, 8, "attention dX, dW", 0),
]
OURS = [
    Box(COMPUTE, 0, 2, "A", 0),
    Box(MESSAGES, 2, 2, "D", 0),
    Box(COMPUTE, 2, 2, "A", 1),
    Box(MESSAGES, 4, 2, "D", 1),
    Box(COMPUTE, 4, 2, "E", 0),
    Box(MESSAGES, 6, 2, "C", 0),
    Box(COMPUTE, 6, 2, "E", 1),
    Box(MESSAGES, 8, 2, "C", 1),
    Box(COMPUTE, 8, 0.5, "", 0),
    Box(COMPUTE, 10, 0.5, "", 1),
    Box(MESSAGES, 10.5, 2, "C", 1),
    Box(MESSAGES, 12.5, 2, "C", 0),
    Box(COMPUTE, 12.5, 2, "E", 1),
    Box(MESSAGES, 14.5, 2, "D", 1),
    Box(COMPUTE, 14.5, 2, "E", 0),
    Box(MESSAGES, 16.5, 2, "D", 0),
    Box(COMPUTE, 16.5, 2, "A", 1),
    Box(COMPUTE, 18.5, 2, "A", 0),
    Box(COMPUTE, 20.5, 8, "weight gradients", "dW"),
]


def draw(axes: plt.Axes, boxes: list[Box], title: str) -> None:
    """Draw one timeline of two lanes; the compute lane is grey where it waits."""
    end = max(box.start + box.length for box in boxes)
    axes.broken_barh([(0, end)], (COMPUTE, 0.8), facecolors=WAITING)
    for box in boxes:
        axes.broken_barh([(box.start, box.length)], (box.lane, 0.8), facecolors=COLOURS[box.owner], edgecolor="white")
        axes.text(box.start + box.length / 2, box.lane + 0.4, box.text, ha="center", va="center", color="white", size=8)
    axes.set_yticks([COMPUTE + 0.4, MESSAGES + 0.4], ["compute", "all-to-alls"])
    axes.set_xticks([])
    axes.set_title(title, loc="left", size=10)
    axes.set_frame_on(False)


def main() -> None:
    """Draw both timelines to the same scale."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 3.6), sharex=True)
    draw(above, STOCK, "stock Megatron: compute waits (grey) for every all-to-all")
    draw(
        below,
        OURS,
        "overlap: two chunks (blue, orange) take turns; deferred weight gradients fill gaps, or the end",
    )
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("overlap.png"), dpi=130)


if __name__ == "__main__":
    main()

"""Measured load of experts: rows by layer, source rank and expert, over a window of steps.

Experts are counted by the model's own numbers (logical ones), wherever they were while the load was measured.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_lancet.files.reader import parse_record, read_text
from megatron_lancet.files.records import to_plain
from megatron_lancet.planning.figures import Count, CountFrom1, Size

EXPERT_LOAD_VERSION = 1


@dataclass(frozen=True)
class LayerLoad:
    """Rows of one layer's experts.

    Attributes:
        layer: global layer number, from 1; of a layer that repeats itself the first one.
        rows: rows from each rank of an expert-parallel group for each expert, summed over the groups.
    """

    layer: CountFrom1
    rows: tuple[tuple[Size, ...], ...]

    def __post_init__(self) -> None:
        if not self.rows or not self.rows[0] or len({len(of_source) for of_source in self.rows}) != 1:
            raise ValueError(f"layer {self.layer} must have rows from at least one rank, for equally many experts")

    @property
    def rows_per_expert(self) -> tuple[int, ...]:
        """Rows of each expert from all ranks."""
        return tuple(map(sum, zip(*self.rows, strict=True)))


@dataclass(frozen=True)
class ExpertLoad:
    """Load of all layers with experts.

    Attributes:
        num_steps: training steps of the window.
        num_layers: layers of the model, without those that predict further tokens.
        layers: in order.
    """

    num_steps: CountFrom1
    num_layers: Count
    layers: tuple[LayerLoad, ...]

    def __post_init__(self) -> None:
        numbers = [layer.layer for layer in self.layers]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"layers must be in order, each once, found {numbers[:8]}")
        if len({(len(layer.rows), len(layer.rows[0])) for layer in self.layers}) > 1:
            raise ValueError("all layers must have the same numbers of ranks and experts")

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 where no layer has any."""
        return len(self.layers[0].rows[0]) if self.layers else 0

    @property
    def ep_size(self) -> int:
        """Ranks of an expert-parallel group; 0 where no layer has experts."""
        return len(self.layers[0].rows) if self.layers else 0

    def to_json(self) -> str:
        """The load as JSON, a line for each layer."""
        head = {"version": EXPERT_LOAD_VERSION, "num_steps": self.num_steps, "num_layers": self.num_layers}
        layers = ",\n  ".join(json.dumps(to_plain(layer)) for layer in self.layers)
        return f'{json.dumps(head)[:-1]}, "layers": [\n  {layers}\n]}}\n'


def read_expert_load(path: Path) -> ExpertLoad:
    """Reads the output of :meth:`ExpertLoad.to_json`.

    Raises:
        RecordError: the file can't be read, or is something else.
    """
    return parse_record(ExpertLoad, read_text(path), EXPERT_LOAD_VERSION, "the expert load", str(path))

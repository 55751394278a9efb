"""On a rank: Megatron's data in the order of the text, and the load of experts of each step."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any


class _Unshuffled:
    """Stands for a RandomState."""

    def shuffle(self, _: Any) -> None:
        """Leaves it as it is."""


@contextmanager
def data_in_order() -> Iterator[None]:
    """Inside the context Megatron builds GPT data sets whose documents and samples keep their order."""
    from megatron.core.datasets import gpt_dataset

    from megatron_lancet.patching import around

    def documents(stock: Callable[..., Any], indices: Any, num_epochs: int, _: Any, separate: bool) -> Any:
        return stock(indices, num_epochs, _Unshuffled(), separate)

    def samples(stock: Callable[..., Any], num_samples: int, total: int, _: Any) -> Any:
        return stock(num_samples, total, _Unshuffled())

    with ExitStack() as stack:
        stack.enter_context(around(gpt_dataset, "_build_document_index", documents))
        stack.enter_context(around(gpt_dataset, "_build_shuffle_index", samples))
        yield


class LoadOfSteps:
    """Appends the load of each step to a file, a line of JSON: by layer, rows from each rank for each expert."""

    def __init__(self, run: Any, path: Path, observe: Callable[[Callable[[], Any], Any], Any]) -> None:
        """
        Args:
            observe: runs a training step of a model's stages.
        """
        self._run = run
        self._path = path
        self._observe = observe

    def observe(self, step: Callable[[], Any], stages: Any) -> Any:
        """Runs a training step and counts its rows. Collective."""
        return self._observe(lambda: self._counted(step), stages)

    def _counted(self, step: Callable[[], Any]) -> Any:
        import torch.distributed as dist

        from megatron_lancet.profiler.expert_load import ExpertRows, gathered_load

        stages = self._run.setup.stages
        comm, rows = stages[0].decoder.comm, ExpertRows(1)
        comm.use(replace(comm.settings, expert_rows=rows.add))
        try:
            result = step()
        finally:
            comm.use(replace(comm.settings, expert_rows=None))
        load = gathered_load(stages, rows, 1)
        if dist.get_rank() == 0 and load is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([layer.rows for layer in load.layers]) + "\n")
        return result

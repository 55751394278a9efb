"""Micro-batches whose shapes change, as with packed samples and in reinforcement learning."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts

_OF_ONE_SHAPE = ("--lancet-max-expert-rows",)
"""Flags whose meaning depends on the shape of a micro-batch."""


class ChangingShapes(Feature):
    """Allows plans that cut no micro-batch, and counts the tokens of each step."""

    name = "changing_shapes"

    def check(self, facts: RunFacts) -> None:
        """Refuses tuning, which compares steps, and chunks, which need a shape that they fit."""
        why = "the shapes of micro-batches change here"
        how = "pass --lancet-num-chunks 1, for pairs also --lancet-pairing on, or --lancet-plan off"
        if facts.plan is not None and facts.plan_changes:
            raise UsageError(f"expected a fixed plan, found --lancet-plan auto, but {why}: {how}.")
        plan = facts.plan
        segments = () if plan is None else (*plan.segments, *plan.at_ends.segments)
        most = max((segment.num_chunks for segment in segments), default=1)
        if most > 1:
            raise UsageError(f"expected one chunk, found a plan with {most}, but {why}: {how}.")
        for flag, entry, _, value in facts.config.entries():
            if flag in _OF_ONE_SHAPE and value != entry.default:
                raise UsageError(f"{flag} is for micro-batches of one shape, but {why}: drop it.")

    def start(self, run: Any) -> "CountedTokens":
        """Counts tokens."""
        return CountedTokens()


class CountedTokens(ActiveFeature):
    """Counts the tokens of a step where they come in: in the first pipeline stage, padding included."""

    def __init__(self) -> None:
        self._own = 0
        self._all: int | None = None  # None until the ranks' tokens are added up

    def adopt(self, stages: Sequence[Any], comm: Any) -> None:
        """Watches the inputs of the first stage."""
        for stage in stages:
            if stage.pre_process:
                stage.register_forward_pre_hook(self._add, with_kwargs=True)

    def observe(self, step: Callable[[], Any]) -> Any:
        """Runs a training step whose tokens are counted."""
        self._own, self._all = 0, None
        return step()

    def num_tokens(self) -> int:
        """Tokens of all ranks' micro-batches. The first call after a step is collective."""
        if self._all is None:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            device = torch.device("cpu" if dist.get_backend(group) == "gloo" else torch.cuda.current_device())
            total = torch.tensor(self._own, device=device)
            dist.all_reduce(total, group=group)
            self._all = int(total.item())
        return self._all

    def _add(self, model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        tokens = named.get("input_ids", inputs[0] if inputs else None)
        if torch.is_grad_enabled() and tokens is not None:
            self._own += tokens.numel()
        elif torch.is_grad_enabled() and (embedded := named.get("decoder_input")) is not None:
            self._own += embedded.shape[0] * embedded.shape[1]

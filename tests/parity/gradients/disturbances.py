"""Disturbances of our model's run: a comparison with stock must see some of them and not be moved by the others."""

import math
import random
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megatron_lancet.patching import around, replaced

DAMAGED = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight"
"""A parameter far from the first one, whose gradient is damaged."""


def erratic_wire(stack: ExitStack) -> None:
    """Makes transfers seem done, or not, at random and differently on each rank, for whoever polls them."""
    from megatron_lancet.runtime.transport.works import WorksTransfer

    dice = random.Random(dist.get_rank())
    stack.enter_context(replaced(WorksTransfer, "done", lambda _: dice.random() < 0.5))


def naive_aux_loss(stack: ExitStack) -> None:
    """Negative control: each chunk balances itself."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_lancet.model.routing.router import ChunkedTopKRouter

    def forward(self, input, padding_mask=None, chunk=None):
        return TopKRouter.forward(self, input, padding_mask)

    stack.enter_context(replaced(ChunkedTopKRouter, "forward", forward))


def padding_is_counted(stack: ExitStack) -> None:
    """Negative control: routers get no padding mask."""
    from megatron_lancet.model import transformer_block

    stack.enter_context(replaced(transformer_block, "padding_of", lambda *_: None))


def lost_weight_grad(stack: ExitStack) -> None:
    """Negative control: now and then a dW does not run."""
    from megatron_lancet.runtime.weight_grad_store import DeferredWeight

    seen = []

    def add(stock, weight, *product):
        seen.append(weight)
        if len(seen) % 29:
            stock(weight, *product)

    stack.enter_context(around(DeferredWeight, "add_product", add))


def uses_added_one_by_one(stack: ExitStack) -> None:
    """Negative control: dWs of a weight with several uses are added one by one, and not summed as autograd does."""
    from megatron_lancet.runtime.weight_grad_store import DeferredWeight

    def add(stock, weight, weight_grad, sum_first=False):
        stock(weight, weight_grad, False)

    stack.enter_context(around(DeferredWeight, "add_to_main_grad", add))


def same_prediction_twice(stack: ExitStack) -> None:
    """Negative control: every prediction sees the embeddings of the first one's tokens."""
    from megatron_lancet.features.mtp.model import OverlappingMTPLayer

    first = {}

    def project(stock, prediction, hidden_states, decoder_input):
        if prediction.layer_number == 1:
            first["embedded"] = decoder_input
        return stock(prediction, hidden_states, first["embedded"])

    stack.enter_context(around(OverlappingMTPLayer, "_concat_embeddings", project))


def detached_experts(stack: ExitStack) -> None:
    """Negative control: no gradient of the experts reaches the input of a layer without attention."""
    from megatron_lancet.model import transformer_layer

    stack.enter_context(around(transformer_layer, "_norm", lambda stock, layer, hidden: stock(layer, hidden.detach())))


def row_counted_twice(stack: ExitStack) -> None:
    """Negative control: the last row of each sum of a token's rows is added twice."""
    from megatron_lancet.runtime.rows.sums import Places

    def sums(stock, places, rows):
        index = places.index_n[: len(rows)]
        return stock(Places(torch.cat((index, index[-1:])), places.num_places), torch.cat((rows, rows[-1:])))

    stack.enter_context(around(Places, "sums", sums))


def choice_of_the_other_expert(stack: ExitStack) -> None:
    """Negative control: of a message's rows with one of the rank's two experts, the first arrives with the other."""
    from megatron_lancet.model.dispatcher import distinct_rows

    def as_numbers(stock, chosen, dtype):
        numbers = stock(chosen, dtype)
        row = chosen.sum(dim=1).eq(1).nonzero()[0]
        numbers[row] = 3 - numbers[row]
        return numbers

    stack.enter_context(around(distinct_rows, "_as_numbers", as_numbers))


def lost_flush(stack: ExitStack) -> None:
    """Negative control: nothing runs or reports what is left at the end of a backward pass."""
    from megatron_lancet.runtime.weight_grad_store import WeightGradStore

    stack.enter_context(replaced(WeightGradStore, "flush", lambda _: None))


def in_second_step(damage: Callable[[torch.nn.Parameter], object]) -> Callable[[ExitStack], None]:
    """Negative control: damages one late parameter when the gradients of the second step are complete."""

    def disturb(stack: ExitStack) -> None:
        from megatron.core.distributed import DistributedDataParallel

        steps = []

        def finish_grad_sync(stock, ddp, *args, **kwargs):
            stock(ddp, *args, **kwargs)
            steps.append(ddp)
            if len(steps) == 2:
                damage(dict(ddp.module.named_parameters())[DAMAGED])

        stack.enter_context(around(DistributedDataParallel, "finish_grad_sync", finish_grad_sync))

    return disturb


def overwrite_one_value(value: float) -> Callable[[torch.nn.Parameter], object]:
    def damage(parameter: torch.nn.Parameter) -> None:
        parameter.main_grad.view(-1)[-1] = value

    return damage


DAMAGED_DEDUP: dict[str, Callable[[ExitStack], None]] = {
    "row-counted-twice": row_counted_twice,
    "choice-of-the-other-expert": choice_of_the_other_expert,
}
DAMAGED_GRADIENTS: dict[str, Callable[[ExitStack], None]] = {
    "nan": in_second_step(overwrite_one_value(math.nan)),
    "infinity": in_second_step(overwrite_one_value(math.inf)),
    "frozen-in-ours-only": in_second_step(lambda parameter: parameter.requires_grad_(False)),
}

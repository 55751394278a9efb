"""Sends a chunk to its experts and back in several rounds, where one would be more rows than a rank may work on.

A round sends a part of the rows, runs the experts on what has arrived, and sends their outputs back. Neither the rows
received nor the experts' activations are kept: the backward pass sends each round's rows again, next to the gradients
of its outputs, runs the experts again, and sends the gradients of the rows. A chunk keeps the rows that its own
rank sent, whose number does not depend on the other ranks. So a chunk over the limit costs two more messages of its
rows and the experts once more, and its peak equals the peak of a chunk at the limit.

Rounds run back to back where the chunk would wait for its dispatch, and in the backward pass where it would launch the
gradients of that message. Messages that are not needed keep their places in the order of turns.

Legend of shapes: n rows that this rank sends, one per token and expert, r rows of a round that it receives, H hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lancet.features.row_bound.rounds import Round
from megatron_lancet.model.dispatcher.base import PlainRows
from megatron_lancet.model.dispatcher.routes import Routes
from megatron_lancet.model.recompute import two_runs
from megatron_lancet.runtime.all_to_all import AllToAll, wait_in_backward, wait_in_forward
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.ops import Op

Rows = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ChunkInRounds:
    """A chunk that is sent in rounds.

    Attributes:
        comm: all-to-alls of the model.
        dispatch: op of the messages with rows.
        combine: op of the messages with outputs.
        rounds: what is sent in each, and the routes of it.
        plain_rows: makes one row per token and expert of what the chunk would have sent.
        experts: maps received tokens [r, H] and probabilities [r], by rank, to their outputs [r, H], by rank.
        parameters: what the experts train.
    """

    comm: Comm
    dispatch: Op
    combine: Op
    rounds: Sequence[Round]
    plain_rows: Callable[[Rows], PlainRows]
    experts: Callable[[Rows, Routes], torch.Tensor]
    parameters: Sequence[torch.nn.Parameter]
    _second_runs: list[AbstractContextManager[None]] = field(default_factory=list)

    def run(self, message: AllToAll, ticket: torch.Tensor, sent: Rows, no_rows: torch.Tensor) -> torch.Tensor:
        """Returns the chunk's rows as they come back, like the rows of its last combine; [N, H].

        Args:
            message: the one in which the rows would have gone.
            ticket: of that message.
            sent: its tensors.
            no_rows: the output of the experts on no rows. Autograd visits the parameters behind it, so DDP gets them in
                the order of a replica whose ranks send the chunk in one message.
        """
        output: torch.Tensor = _InRounds.apply(self, message, sent, ticket, no_rows, *self.parameters)
        return output

    def forward(self, sent: Rows) -> torch.Tensor:
        """Runs the rounds of the forward pass."""
        rows = self.plain_rows(sent)
        output_nH = rows.tokens.new_empty(0)
        for one in self.rounds:
            received = self._wait_in_forward(self.dispatch, (one.picked(rows.tokens), one.picked(rows.probs)), one)
            first, second = two_runs()
            self._second_runs.append(second)
            # Kernels may depend on whether gradients are enabled; the graph is dropped at once.
            with first, torch.enable_grad():
                output = self.experts(received, one.routes).detach()
            del received
            (returned,) = self._wait_in_forward(self.combine, (output,), one, back=True)
            if one is self.rounds[0]:
                output_nH = returned.new_empty(rows.tokens.shape)
            one.put_back(returned, output_nH)
        return output_nH if rows.place is None else rows.place.sums(output_nH)

    def backward(self, sent: Rows, grad: torch.Tensor) -> tuple[Rows, list[torch.Tensor | None]]:
        """Runs the rounds of the backward pass.

        Returns:
            The gradients of ``sent``, and of the parameters; None for those whose gradients are deferred.
        """
        if self.comm.store is not None:
            self.comm.store.expect_inner_backward()
        own = tuple(tensor.detach().requires_grad_() for tensor in sent)
        with torch.enable_grad():
            rows = self.plain_rows(own)
        grad_nH = grad if rows.place is None else grad.index_select(0, rows.place.index_n)
        tokens_nH, probs_n = rows.tokens.detach(), rows.probs.detach()
        grads = torch.empty_like(tokens_nH), torch.empty_like(probs_n)
        of_parameters: list[torch.Tensor | None] = [None] * len(self.parameters)
        for one, second in zip(self.rounds, self._second_runs, strict=True):
            again = one.picked(tokens_nH), one.picked(probs_n)
            received, (of_output,) = self._again(one, again, one.picked(grad_nH))
            del again
            of_rows, of_round = self._gradients_of(received, of_output, one.routes, second)
            del received, of_output
            for rows_n, returned in zip(grads, self._send_gradients(of_rows, one), strict=True):
                one.put_back(returned, rows_n)
            of_parameters = [_sum(*pair) for pair in zip(of_parameters, of_round, strict=True)]
        self._second_runs.clear()
        if rows.place is None:
            return grads, of_parameters
        return torch.autograd.grad((rows.tokens, rows.probs), own, grads), of_parameters

    def _wait_in_forward(self, op: Op, tensors: Rows, one: Round, back: bool = False) -> Rows:
        splits = one.splits.reversed() if back else one.splits
        return wait_in_forward(self.comm, op, self.comm.launch(op, tensors, splits))

    def _again(self, one: Round, rows: Rows, grad: torch.Tensor) -> tuple[Rows, Rows]:
        """Sends a round's rows and the gradients of its outputs, and waits for both."""
        op = self.combine.mirrored()
        messages = self.comm.launch(self.dispatch, rows, one.splits), self.comm.launch(op, (grad,), one.splits)
        received, of_output = (wait_in_backward(self.comm, op, message) for message in messages)
        return received, of_output

    def _send_gradients(self, grads: Rows, one: Round) -> Rows:
        op = self.dispatch.mirrored()
        return wait_in_backward(self.comm, op, self.comm.launch(op, grads, one.splits.reversed()))

    def _gradients_of(
        self, received: Rows, of_output: torch.Tensor, routes: Routes, second_run: AbstractContextManager[None]
    ) -> tuple[Rows, Sequence[torch.Tensor | None]]:
        """Runs the experts again and their backward; gradients of the rows and of the parameters.

        The gradients are asked for, and not added up in the parameters: the pass around this one does that, once.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in received]
        with second_run, torch.enable_grad():
            output = self.experts(tuple(leaves), routes)
        of_tokens, of_probs, *others = torch.autograd.grad(
            output, (*leaves, *self.parameters), of_output, allow_unused=True
        )
        return (of_tokens, of_probs), others


class _InRounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: ChunkInRounds, message: AllToAll, sent: Rows, *_: torch.Tensor) -> torch.Tensor:
        ctx.chunk, ctx.message = chunk, message
        ctx.save_for_backward(*sent)
        return chunk.forward(sent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grads, of_parameters = ctx.chunk.backward(ctx.saved_tensors, grad.contiguous())
        ctx.message.return_gradients(*grads)
        return None, None, None, grad.new_empty(0), grad[:0], *of_parameters


def _sum(before: torch.Tensor | None, addend: torch.Tensor | None) -> torch.Tensor | None:
    # Not in place: a gradient may be memory of the module that has made it.
    return addend if before is None else before if addend is None else before + addend

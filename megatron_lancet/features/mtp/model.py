"""Multi-token prediction: further layers, each of which predicts one more token from the layer before it.

The micro-batch is not cut at the beginning of each, where the hidden states are joined with the embeddings of the next
tokens. From there its transformer layer runs in chunks, as a layer of the decoder does.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, MultiTokenPredictionLayer

from megatron_lancet.model.adopt import adopt
from megatron_lancet.model.attention.masks import MaskLimit, look_once
from megatron_lancet.model.chunking import Rotary, unchunked_micro_batch
from megatron_lancet.model.ops import ChunkState, end_layers
from megatron_lancet.model.parts import ModelPart, PrepareLayer
from megatron_lancet.model.recompute import maybe_recomputed, recompute_of_mtp
from megatron_lancet.model.routing.padding import padding_for_stock, padding_of
from megatron_lancet.model.samples import DocumentReader, PackedMicroBatch
from megatron_lancet.model.te.precision import block_precision, op_precision
from megatron_lancet.model.transformer_block import (
    SegmentForward,
    begin_layer,
    document_masks,
    random_state,
    refuse_arguments,
    segments_here,
)
from megatron_lancet.model.transformer_layer import BoundOp, LayerOps, OverlappingLayer
from megatron_lancet.runtime.comm import Comm
from megatron_lancet.schedule.ops import Op, OpKind, Phase
from megatron_lancet.schedule.plan import Plan
from megatron_lancet.schedule.turns import Compute, Instruction


@dataclass(frozen=True)
class Depth:
    """A prediction's place among the predictions of a micro-batch.

    Attributes:
        layer: its transformer layer, with the number of this depth.
        projection: the instruction that runs on the unchunked micro-batch, before the instructions of ``segment``.
        end_segment: like ``segment``, for micro-batches at the ends of a step with pairing.
        following: the op after the layer; None where that is on the next stage.
    """

    layer: OverlappingLayer
    projection: Instruction
    segment: SegmentForward
    end_segment: SegmentForward
    following: Op | None


class OverlappingMTPLayer(MultiTokenPredictionLayer):
    """Megatron's prediction of one more token; in training its transformer layer runs in chunks.

    Attributes:
        depths: one, or several of a repeated layer.
        documents: see :class:`LayersByPlan`.
        checked_limits: see :class:`LayersByPlan`.
    """

    documents: DocumentReader | None = None
    checked_limits: Set[MaskLimit] = frozenset()
    depths: Sequence[Depth]
    _num_runs: int

    def begin_micro_batch(self) -> None:
        """Begins with the first depth again."""
        self._num_runs = 0

    def _checkpointed_forward(self, **kwargs: Any) -> torch.Tensor:
        # Stock's checkpoint would repeat the all-to-alls: see Recompute.
        if torch.is_grad_enabled():
            return self._proj_and_transformer_layer(**kwargs)
        return super()._checkpointed_forward(**kwargs)

    def _proj_and_transformer_layer(
        self,
        hidden_states: torch.Tensor,
        decoder_input: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: Rotary | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run a prediction from its projection on.

        Args:
            hidden_states: [S, B, H], output of the layer before it.
            decoder_input: embeddings of the next tokens, [S, B, H].
            attention_mask: [B or 1, 1, S, S] or None, True where attention is not allowed.
            packed_seq_params: see :meth:`LayersByPlan.run_layers`.
            padding_mask: see :meth:`LayersByPlan.run_layers`; Megatron shifts it like the tokens.

        Raises:
            UsageError: an input that can't be cut into chunks, or a hook that would not run.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self._run_stock(
                hidden_states,
                decoder_input,
                rotary_pos_emb,
                packed_seq_params,
                padding_mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                **kwargs,
            )
        refuse_arguments(kwargs)
        depth = self.depths[self._num_runs]
        self._num_runs += 1
        segment = depth.end_segment if depth.layer.comm.progress.is_at_end else depth.segment
        in_layer = [(segment.segment, depth.layer.stock)]
        self.checked_limits = look_once(attention_mask, self.checked_limits, in_layer, hidden_states.size(0))
        packed = None if packed_seq_params is None else self._packed(packed_seq_params, hidden_states)
        begin_layer(depth.layer.stock, None if packed is None else packed.documents)
        trace = depth.layer.comm.trace
        if packed is not None:
            hidden_states, decoder_input = packed.unflattened(hidden_states), packed.unflattened(decoder_input)
        padding = padding_of(padding_mask, hidden_states, packed)
        unchunked = unchunked_micro_batch(attention_mask, rotary_pos_emb, attention_bias, packed, padding)
        micro_batch = ChunkState(unchunked)
        micro_batch.hidden_sbH, micro_batch.embedded_sbH = hidden_states, decoder_input
        with random_state(self.config):
            BoundOp(segment.ops, depth.layer, depth.projection).run(micro_batch)
            with block_precision(self.config):
                segment.run(micro_batch, trace)
        hidden = micro_batch.hidden_sbH if packed is None else packed.flattened(micro_batch.hidden_sbH)
        hidden = self._postprocess(end_layers(trace, hidden, depth.following))
        return hidden

    def _run_stock(
        self,
        hidden_states: torch.Tensor,
        decoder_input: torch.Tensor,
        rotary_pos_emb: Rotary | None,
        packed_seq_params: PackedSeqParams | None,
        padding_mask: torch.Tensor | None,
        **inputs: Any,
    ) -> torch.Tensor:
        """Megatron's own prediction, whose attention has the documents."""
        run = super()._proj_and_transformer_layer
        if packed_seq_params is None:
            inputs = {"rotary_pos_emb": rotary_pos_emb, "padding_mask": padding_mask, **inputs}
            return run(hidden_states, decoder_input, **inputs)
        packed = self._packed(packed_seq_params, hidden_states)
        chunk = unchunked_micro_batch(rotary_pos_emb=rotary_pos_emb, packed=packed)
        unflattened = packed.unflattened(hidden_states), packed.unflattened(decoder_input)
        padding = padding_for_stock(padding_mask, unflattened[0], packed)
        inputs = {"rotary_pos_emb": chunk.rotary_pos_emb, "padding_mask": padding, **inputs}
        with document_masks(chunk, [self.mtp_model_layer]):
            return packed.flattened(run(*unflattened, **inputs))

    def _packed(self, params: PackedSeqParams, hidden: torch.Tensor) -> PackedMicroBatch:
        """
        Raises:
            UsageError: the documents don't fit ``hidden``.
        """
        assert hasattr(multi_token_prediction.roll_tensor, "__wrapped__"), "Megatron shifts all samples alike"
        assert self.documents is not None, "the decoder has refused documents"
        return self.documents.read(params, hidden, self.config)


class OverlappingMTP(MultiTokenPredictionBlock):
    """Megatron's predictions of further tokens, which run a plan.

    Attributes:
        overlapping_layers: the transformer layer of each depth. A repeated layer is the same module at all depths.
        following: the op after the last prediction; None where that is on the next stage.
    """

    overlapping_layers: Sequence[OverlappingLayer]
    following: Op | None

    def run_by(self, plan: Plan) -> None:
        """Runs ``plan`` from the next micro-batch on."""
        following, depths = self.following, []
        for layer in reversed(self.overlapping_layers):
            (middle,), (end,) = segments_here(plan.in_middle, [layer]), segments_here(plan.at_ends, [layer])
            projection = middle.program[0]
            assert isinstance(projection, Instruction)
            segment, end_segment = (replace(whole, program=whole.program[1:]) for whole in (middle, end))
            depths.append(Depth(layer, projection, segment, end_segment, following))
            following = projection.op
        for prediction in self.layers:
            prediction.depths = [depth for depth in reversed(depths) if depth.layer.prediction is prediction]

    def num_waits(self, at_end: bool) -> int:
        """Number of messages that the forward of a micro-batch waits for.

        Args:
            at_end: whether it is one at an end of a step with pairing.
        """
        depths = [depth for prediction in self.layers for depth in prediction.depths]
        return sum((depth.end_segment if at_end else depth.segment).num_waits for depth in depths)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Predict the further tokens one after the other; arguments and result are Megatron's."""
        for prediction in self.layers:
            prediction.begin_micro_batch()
        return super().forward(*args, **kwargs)


class _Predictions(ModelPart):
    def prepare_layers(self, model: Any, comm: Comm, prepare: PrepareLayer) -> None:
        """Prepares the layers of multi-token prediction, which are numbered from the model's last layer on."""
        if not _has_predictions(model):
            return
        mtp, config, block = adopt(model.mtp, OverlappingMTP), model.config, model.decoder
        layers = []
        for number, prediction in enumerate(mtp.layers, start=config.num_layers + 1):
            prediction = adopt(prediction, OverlappingMTPLayer)
            layer = prepare(prediction.mtp_model_layer, number, recompute_of_mtp(config), comm)
            layers.append(replace(layer, prediction=prediction))
        if config.mtp_use_repeated_layer:
            layers = [layers[0].numbered(layers[0].number + depth) for depth in range(config.mtp_num_layers)]
        mtp.overlapping_layers, mtp.following = layers, block.following
        block.following = Op(layers[0].number, 0, Phase.FORWARD, OpKind.MTP_PROJECTION)

    def stacks(self, model: Any) -> Sequence[OverlappingMTP]:
        """The predictions, where this stage has them."""
        return [model.mtp] if _has_predictions(model) else []

    def parts_with_several_uses(self, model: Any) -> Iterator[torch.nn.Module]:
        """Yields the output layer, which each depth uses, and the layers of depths that are the same module."""
        config = model.config
        if config.mtp_num_layers and model.post_process and not getattr(config, "mtp_detach_heads", False):
            yield model.output_layer
        if _has_predictions(model) and len(model.mtp.overlapping_layers) > len(model.mtp.layers):
            yield model.mtp

    def layer_ops(self) -> LayerOps:
        """The projection of each depth."""
        return OPS


def _has_predictions(model: Any) -> bool:
    """Whether this stage has the layers of multi-token prediction."""
    return getattr(model, "mtp_process", False)


def project(layer: OverlappingLayer, x: ChunkState) -> None:
    """Join the hidden states with the embeddings of the next tokens, before the layer of a multi-token prediction."""
    with block_precision(layer.stock.config):
        x.hidden_sbH = maybe_recomputed(layer.recompute.attention, _project, layer, x.hidden_sbH, x.embedded_sbH)
    del x.embedded_sbH


def _project(layer: OverlappingLayer, hidden_sbH: torch.Tensor, embedded_sbH: torch.Tensor) -> torch.Tensor:
    """Norms of both and projection to [s, b, H]."""
    assert layer.prediction is not None
    with op_precision(layer.stock):
        return layer.prediction._concat_embeddings(hidden_sbH, embedded_sbH)


OPS: LayerOps = {Compute(OpKind.MTP_PROJECTION): project}
PREDICTIONS = _Predictions()

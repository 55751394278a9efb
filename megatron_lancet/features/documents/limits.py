"""Settings that do not work with samples of documents."""

import argparse

from megatron_lancet.config import OWN_SPEC, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.training.flag_conflicts import predicts_beside_loss
from megatron_lancet.training.layer_pattern import OTHER_LAYERS, hybrid_pattern
from megatron_lancet.training.plan.attention import DOCUMENTS_FLAG
from megatron_lancet.training.plan.support import may_overlap


def check_documents(args: argparse.Namespace, config: LancetConfig) -> None:
    """Checks a run with ``--dataloader-inter-document-masking``, or a launcher's packed samples.

    Args:
        args: Megatron's arguments, validated.

    Raises:
        UsageError: a part of the run does not support documents.
    """
    if not args.dataloader_inter_document_masking:
        return
    is_packed_by_launcher = getattr(args, "lancet_packed_samples", False)
    if is_packed_by_launcher and not may_overlap(args, config):
        return  # the model stays as its launcher made it
    documents = "this launcher's packing of samples" if is_packed_by_launcher else DOCUMENTS_FLAG
    for symbol, reason in OTHER_LAYERS.items():
        if symbol in (hybrid_pattern(args) or ""):
            raise UsageError(
                f"{documents} does not work with --hybrid-layer-pattern with {symbol} "
                f"({reason.partition(':')[0]}): these layers would carry state from document to document. Drop one of "
                "the two."
            )
    context = args.context_parallel_size
    if context > 1 and not may_overlap(args, config):
        raise UsageError(
            f"{DOCUMENTS_FLAG} with --context-parallel-size {context} needs the overlapping block: Megatron's own "
            "layers expect documents that are multiples of 2 x context parallel size. Run local layers with a "
            "plan, or use --reset-attention-mask --reset-position-ids with local layers."
        )
    if context > 1 and args.mtp_num_layers:
        raise UsageError(
            f"--mtp-num-layers does not work with {documents} and --context-parallel-size {context}: Megatron "
            "shifts each document as if it were cut over the ranks by itself. Drop one of the three."
        )
    if args.mtp_num_layers and not predicts_beside_loss(args):
        raise UsageError(
            f"{documents} needs predictions on the stage of the loss (mL), found --pipeline-model-parallel-layout "
            f"{args.pipeline_model_parallel_layout}: a stage after them would get several hidden states of a token. "
            "Change the layout, or drop one of the two."
        )
    _check_own_script(args)


def shapes_vary(args: argparse.Namespace, has_plan: bool) -> bool:
    """Whether pipeline stages send each other hidden states in other shapes than [--seq-length, --micro-batch-size, H].

    Megatron's own layers take samples laid end to end, and send them on in this way.

    Args:
        has_plan: whether the layers are the overlapping ones.
    """
    return bool(args.dataloader_inter_document_masking) and not has_plan and args.micro_batch_size > 1


def _check_own_script(args: argparse.Namespace) -> None:
    """Megatron's own pretrain_gpt.py lays the samples of a micro-batch end to end before it shares them out.

    Raises:
        UsageError: the block can't separate them again.
    """
    if args.spec is None or tuple(args.spec) != OWN_SPEC:
        return
    blockers = {
        f"--context-parallel-size {args.context_parallel_size}": args.context_parallel_size > 1,
        f"--sequence-parallel and --micro-batch-size {args.micro_batch_size}": args.sequence_parallel
        and args.micro_batch_size > 1,
        # Megatron would give later stages the hidden states in the shape of samples next to each other.
        f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} and --micro-batch-size "
        f"{args.micro_batch_size}": args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1,
    }
    for blocker, is_set in blockers.items():
        if is_set:
            raise UsageError(
                f"{DOCUMENTS_FLAG} does not work with {blocker} in Megatron's own script, which lays the samples of a "
                "micro-batch end to end. Start it with pretrain_gpt_moe.py, or drop one of them."
            )

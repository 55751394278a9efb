"""Packed documents in a run, ``--dataloader-inter-document-masking`` of Megatron."""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_lancet.config import LancetConfig
from megatron_lancet.feature import ActiveFeature, Feature
from megatron_lancet.feature_parts import ReadBatch, SmallLaunch
from megatron_lancet.features.documents.limits import check_documents, shapes_vary
from megatron_lancet.features.documents.sharing import read_documents
from megatron_lancet.training.plan.attention import DOCUMENTS_FLAG
from megatron_lancet.training.plan.support import own_samples
from megatron_lancet.training.run import OverlappedRun, Run


class DocumentsFeature(Feature):
    """Samples that are made of documents, which do not attend to each other."""

    name = "documents"

    def check_layers(self, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses layers that do not know documents."""
        check_documents(args, config)

    def batches(self, args: argparse.Namespace, config: LancetConfig) -> ReadBatch | None:
        """Shares out micro-batches with the bounds of their documents."""
        if not args.dataloader_inter_document_masking:
            return None
        return partial(read_documents, args, own_samples(args, config) is not None)

    def shapes_vary(self, args: argparse.Namespace, has_plan: bool) -> bool:
        """Whether Megatron's own layers take samples laid end to end."""
        return shapes_vary(args, has_plan)

    def start(self, run: Run) -> "ActiveDocuments | None":
        """Prepares the model for documents."""
        has_documents = run.facts.args.dataloader_inter_document_masking
        return ActiveDocuments() if has_documents and isinstance(run, OverlappedRun) else None

    def shrink_axes(self, args: argparse.Namespace, axes: dict[str, int]) -> Iterator[str]:
        """Leaves virtual stages out: stock gets a mask."""
        if args.dataloader_inter_document_masking and axes["virtual"] > 1:
            yield "no virtual stages: Megatron gives the mask of documents to the first and the last one only"
            axes["virtual"] = 1

    def shrink(self, launch: SmallLaunch) -> None:
        """Gives stock a mask in place of the flag."""
        if launch.args.dataloader_inter_document_masking:
            launch.ours.append(DOCUMENTS_FLAG)
            launch.stock_mask = True
            launch.changes.append(
                f"stock gets a mask of documents in place of {DOCUMENTS_FLAG}: same result, by another way"
            )


class ActiveDocuments(ActiveFeature):
    """The documents of a run."""

    def model_settings(self) -> Mapping[str, Any]:
        """Prepares all attentions."""
        return {"documents": True}


DOCUMENTS = DocumentsFeature()

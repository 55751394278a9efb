"""``--lancet-from-hf`` and ``--lancet-save-hf`` in a run."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args, get_tokenizer, training

from megatron_lancet.config import LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import ActiveFeature, Feature, RunFacts
from megatron_lancet.features.hugging_face import model, weights
from megatron_lancet.features.hugging_face.flags import FROM, SAVE, HuggingFaceFlags
from megatron_lancet.features.hugging_face.folders import check_writable, save
from megatron_lancet.features.hugging_face.source import Source, source_of
from megatron_lancet.patching import around
from megatron_lancet.training.megatron.seams import missing_functions
from megatron_lancet.training.process.console import say
from megatron_lancet.training.run import Run

_UNLOADED = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "init_model_with_meta_device": "--init-model-with-meta-device",
}


class HuggingFaceWeights(Feature):
    """A model from a Hugging Face folder, and into one."""

    name = "hugging_face"
    flags = HuggingFaceFlags

    def missing_seams(self) -> Iterator[str]:
        """Yields what is changed of Megatron, and this Megatron lacks."""
        changed = [(training, "save_checkpoint", ("iteration", "non_persistent_ckpt"))]
        yield from missing_functions([*changed, (Float16Module, "__init__", ("config", "module"))])

    def change_parser(self, parser: argparse.ArgumentParser) -> None:
        """Makes the folder's model the default, so that whatever differs afterwards was given."""
        words = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        words.add_argument(FROM, dest="folder")
        folder = words.parse_known_args(sys.argv[1:])[0].folder
        if folder:
            parser.set_defaults(**model.defaults(source_of(folder)))

    def check_arguments(self, args: argparse.Namespace, config: LancetConfig) -> None:
        """Refuses arguments that describe another model, and what weights can't go into or out of."""
        wanted = config.of(HuggingFaceFlags)
        if wanted.from_hf is None:
            if wanted.save_hf is not None:
                raise UsageError(f"{SAVE} expects {FROM}, whose configuration and tokenizer it copies. Add {FROM} DIR.")
            return
        for name, flag in _UNLOADED.items():
            if getattr(args, name):
                raise UsageError(f"{FROM} does not work with {flag}: its weights are elsewhere. Drop one of them.")
        source = source_of(wanted.from_hf)
        model.check_given(source, args)
        vocab, tensor_size = source.provider.vocab_size, args.tensor_model_parallel_size
        if vocab % tensor_size:
            raise UsageError(
                f"{FROM} {source.folder}: expected a tensor parallel size that divides its {vocab} tokens, found "
                f"{tensor_size}. Change --tensor-model-parallel-size."
            )

    def layout_blockers(self, args: argparse.Namespace) -> Iterator[str]:
        """Yields the flag that sets the sizes of the model."""
        if args.lancet_from_hf is not None:
            yield FROM

    def check(self, facts: RunFacts) -> None:
        """Refuses a configuration or a tokenizer that is not the folder's, and a folder that can't be written."""
        wanted = facts.config.of(HuggingFaceFlags)
        if wanted.from_hf is None:
            return
        from megatron_lancet.training.megatron.models import model_config_from_args  # megatron-core 0.18 lacks a part

        source = source_of(wanted.from_hf)
        model.check_built(source, model_config_from_args(facts.args).transformer)
        if facts.is_dry_run:
            return
        num_tokens = get_tokenizer().vocab_size
        if num_tokens > source.provider.vocab_size:
            raise UsageError(
                f"{FROM} {source.folder}: expected a tokenizer of at most {source.provider.vocab_size} tokens, found "
                f"{num_tokens}. Take the folder's: drop --tokenizer-type."
            )
        if wanted.save_hf is not None:
            check_writable(Path(wanted.save_hf))

    def announce(self, facts: RunFacts) -> Iterator[str]:
        """Says where weights come from."""
        wanted = facts.config.of(HuggingFaceFlags)
        if wanted.from_hf is not None:
            source = source_of(wanted.from_hf)
            yield f"weights: {source.architecture} of {source.folder}, by Megatron-Bridge"

    def start(self, run: Run) -> "ActiveHuggingFace | None":
        """Loads the run's model, and saves it."""
        wanted = run.config.of(HuggingFaceFlags)
        if wanted.from_hf is None:
            return None
        return ActiveHuggingFace(source_of(wanted.from_hf), None if wanted.save_hf is None else Path(wanted.save_hf))


class ActiveHuggingFace(ActiveFeature):
    """Weights of a run.

    Args:
        folder: where it saves; None where it does not.
    """

    def __init__(self, source: Source, folder: Path | None) -> None:
        self._source = source
        self._folder = folder
        self._stages: Sequence[torch.nn.Module] = ()
        self._saved_step: int | None = None

    def prepare_stock(self, stages: Sequence[torch.nn.Module]) -> None:
        """Loads the weights."""
        self._stages = stages
        weights.load(self._source, stages)

    def adopt(self, stages: Sequence[torch.nn.Module], comm: Any) -> None:
        """Loads the weights, before other features move them between ranks."""
        self.prepare_stock(stages)

    def enter(self, stack: ExitStack) -> None:
        """Keeps the routers' biases exact. Saves where Megatron does, and at the end of the training."""
        stack.enter_context(around(Float16Module, "__init__", _with_exact_biases))
        if self._folder is None:
            return

        def save_checkpoint(stock: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
            result = stock(iteration, *args, **kwargs)
            if not kwargs.get("non_persistent_ckpt", False):
                self._save(iteration)
            return result

        stack.enter_context(around(training, "save_checkpoint", save_checkpoint))
        stack.enter_context(around(training, "train", self._train))

    def _train(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            step, num_flops = stock(*args, **kwargs)
        except SystemExit as request:
            if request.code == 0:  # else the last step was not applied
                self._save(get_args().curr_iteration + 1)  # which counts from 0
            raise
        self._save(step)
        return step, num_flops

    def _save(self, step: int) -> None:
        if self._folder is None or step == self._saved_step:
            return
        target = self._folder / f"iter_{step:07}"
        save(self._source, self._stages, target)
        self._saved_step = step
        say(f"Megatron-Lancet weights: wrote {target}")


def _with_exact_biases(stock: Callable[..., None], wrapper: Any, config: Any, module: torch.nn.Module) -> None:
    """Wraps a model for bf16 or fp16, whose routers add biases in fp32: stock rounds them first."""
    routers = [one for one in module.modules() if isinstance(one, TopKRouter) and one.expert_bias is not None]
    biases = [router.expert_bias for router in routers]
    stock(wrapper, config, module)
    for router, bias in zip(routers, biases, strict=True):
        router.expert_bias = bias


HUGGING_FACE = HuggingFaceWeights()

"""pretrain_gpt_moe.py on a rank, with its tokens, losses, logits and gradients written down in Hugging Face's names.

LANCET_TEST_RESULT names the folder. In it is also the model as it is saved before the first step.
"""

import functools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.training import training

from megatron_lancet.features.hugging_face import folders, weights
from megatron_lancet.patching import around, replaced
from megatron_lancet.training.platform import detect
from megatron_lancet.training.pretrain import main
from tests import te_cpu
from tests.bridge import preload  # noqa: F401

OUT = Path(os.environ["LANCET_TEST_RESULT"])


class Recorder:
    """The calls of a model in each step."""

    def __init__(self) -> None:
        self.stages: Any = None
        self.source: Any = None
        self.steps: list[list[dict[str, torch.Tensor]]] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.logits: list[torch.Tensor] = []

    def load(self, stock: Any, source: Any, stages: Any) -> None:
        stock(source, stages)
        self.source, self.stages = source, stages
        for stage in stages:
            stage.register_forward_hook(self.after_model, with_kwargs=True)
            if stage.post_process:
                stage.output_layer.register_forward_hook(self.after_output_layer)

    def after_model(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        losses = output[0] if isinstance(output, tuple) else output
        self.steps[-1].append(
            {
                "tokens": kwargs.get("input_ids", args[0] if args else None),
                "labels": kwargs["labels"],
                "losses": losses.detach().clone(),
                "logits": self.logits[-1] if self.logits else torch.empty(0),  # of the decoder
            }
        )
        self.logits.clear()

    def after_output_layer(self, layer: Any, args: Any, output: Any) -> None:
        self.logits.append(output[0].detach().clone())  # the loss overwrites them

    def train_step(self, stock: Any, forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        if not self.steps:
            folders.save(self.source, self.stages, OUT / "iter_0000000")
        self.steps.append([])
        with around(optimizer, "step", self.optimizer_step):
            return stock(forward, data, model, optimizer, *args, **kw)

    def optimizer_step(self, stock: Any) -> Any:
        if len(self.steps) == 1 and "LANCET_TEST_GRADIENTS" in os.environ:
            parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
            held = [parameter.data for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.main_grad.to(parameter.dtype)
            self.gradients = {name: value.clone() for name, value in weights.stream(self.source, self.stages)}
            for parameter, data in zip(parameters, held, strict=True):
                parameter.data = data
        return stock()

    def write(self, rank: int) -> None:
        torch.save({"steps": self.steps, "gradients": self.gradients}, OUT / f"rank{rank}.pt")


if __name__ == "__main__":
    recorder = Recorder()
    with ExitStack() as stack:
        stack.enter_context(around(weights, "load", recorder.load))
        stack.enter_context(around(training, "train_step", recorder.train_step))
        if te_cpu.is_installed():
            stack.enter_context(replaced(detect, "cpu_platform", functools.partial(te_cpu.te_platform, (9, 0))))
        main()
    if recorder.steps:
        recorder.write(int(os.environ["RANK"]))

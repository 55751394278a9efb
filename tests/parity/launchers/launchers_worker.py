"""Plays how verl, slime, ms-swift and NeMo-RL call Megatron-Core, stock and with the overlap, on two ranks.

Stand-in packages have the modules and names that the launchers look up; their training is :class:`Policy`.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.library import launchers
from megatron_lancet.training.megatron.patches import fused_core_attention
from megatron_lancet.training.platform.cpu import cpu_platform
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, small_gpt, transformer_config

GLOBAL_STEPS = ([3, 1, 2], [2, 4])
"""Micro-batches of each optimizer step of each global step."""
NUM_STEPS = sum(map(len, GLOBAL_STEPS))


@dataclass
class Recorded:
    """What two trainings are compared by."""

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    num_tokens: int = 0


def batches(seed: int, number: int, packs: bool) -> list[dict[str, Any]]:
    """Rows of unlike lengths, in each micro-batch and on each data-parallel rank.

    Args:
        packs: whether a row has several documents, which do not attend to each other.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    generator = torch.Generator().manual_seed(100 * seed + parallel_state.get_data_parallel_rank())
    found = []
    for _ in range(number):
        lengths = torch.randint(2, SEQ_LENGTH, (3 if packs else 1,), generator=generator)
        tokens = torch.randint(VOCAB, (1, int(lengths.sum()) + 1), generator=generator)
        positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
        batch: dict[str, Any] = {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": tokens[:, 1:]}
        if packs:
            ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            longest = int(lengths.max())
            # One tensor in all fields, as verl and NeMo-RL pass it.
            batch["packed_seq_params"] = PackedSeqParams("thd", ends, ends, ends, ends, longest, longest)
        found.append(batch)
    return found


def forward_step(data: Iterator[dict[str, Any]], model: Any, loss_of: Callable[[torch.Tensor], Any]) -> Any:
    return model(attention_mask=None, **next(data)), loss_of


def policy_loss(output: torch.Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def log_probs(output: torch.Tensor) -> Any:
    return output.new_zeros(1), {"loss": -output.detach().mean()}


class Policy:
    """A model in training.

    Args:
        freezes_router: whether routers are not trained, as NeMo-RL's recipes ask.
        packs: whether samples are packed.
    """

    def __init__(self, freezes_router: bool = False, packs: bool = True) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.packs = packs
        config, stage = built()
        for name, weight in stage.named_parameters():
            weight.requires_grad_(not (freezes_router and "router" in name))
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=4000
        )
        self.stages = [DistributedDataParallel(config, ddp_config, stage)]
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.stages[0].no_sync
        config.grad_scale_func = config.timers = None
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, clip_grad=1.0), self.stages
        )

    def run(self, seed: int, number: int, forward_only: bool = False) -> float:
        return run(self.stages, batches(seed, number, self.packs), forward_only)

    def update(self, seed: int, number: int, recorded: Recorded) -> None:
        for stage in self.stages:
            stage.train()
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        recorded.losses.append(self.run(seed, number))
        recorded.num_tokens += sum(batch["input_ids"].numel() for batch in batches(seed, number, self.packs))
        for name, weight in self.stages[0].module.named_parameters():
            if weight.requires_grad:
                recorded.tensors[f"gradient {seed} {name}"] = weight.main_grad.clone()
        assert self.optimizer.step()[0]

    def log_probs(self, seed: int, number: int) -> float:
        for stage in self.stages:
            stage.eval()
        with torch.no_grad():
            return self.run(seed, number, forward_only=True)

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """What a rollout server gets."""
        weights = self.stages[0].module.named_parameters()
        return {f"weight {seed} {name}": weight.detach().clone() for name, weight in weights}

    def off_the_gpu_and_back(self) -> None:
        """Frees and restores the storages of weights and gradients, as verl does around rollouts."""
        for buffer in (*self.stages[0].buffers, *self.stages[0].expert_parallel_buffers):
            size, kept = buffer.param_data.untyped_storage().size(), buffer.param_data.clone()
            gradients = buffer.grad_data.untyped_storage().size()
            for storage in (buffer.param_data.untyped_storage(), buffer.grad_data.untyped_storage()):
                storage.resize_(0)
            buffer.param_data.untyped_storage().resize_(size)
            buffer.grad_data.untyped_storage().resize_(gradients)
            buffer.param_data.copy_(kept)
            buffer.grad_data.zero_()


def built() -> tuple[Any, Any]:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = transformer_config(**EXPERTS, expert_model_parallel_size=2, variable_seq_lengths=True)
    # Megatron's local attention has no documents.
    with fused_core_attention(True):
        return config, small_gpt(config)


def run(stages: list[Any], rows: list[dict[str, Any]], forward_only: bool) -> float:
    """The call of all four launchers; shapes are not known before the micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    results = get_forward_backward_func()(
        forward_step_func=partial(forward_step, loss_of=log_probs if forward_only else policy_loss),
        data_iterator=iter(rows),
        model=stages,
        num_microbatches=len(rows),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return torch.stack([result["loss"] for result in results]).mean().item()


def reinforced(policy: Policy, reference: list[Any]) -> Recorded:
    """Global steps of reinforcement learning: log-probabilities of two models, then several updates."""
    recorded = Recorded()
    for global_step, updates in enumerate(GLOBAL_STEPS):
        seed = 10 * global_step
        recorded.tensors |= policy.weights(seed)
        policy.off_the_gpu_and_back()
        recorded.losses.append(policy.log_probs(seed, 3))
        with torch.no_grad():
            recorded.losses.append(run(reference, batches(seed, 3, policy.packs), forward_only=True))
        for index, number in enumerate(updates):
            policy.update(seed + index + 1, number, recorded)
    recorded.tensors |= policy.weights(999)
    return recorded


def of_verl() -> Recorded:
    """The reference model is built without DDP, and before the actor."""
    _, reference = built()
    return reinforced(Policy(), [reference])


def of_slime() -> Recorded:
    """The policy's own model holds the reference weights during the reference pass."""
    policy = Policy()
    return reinforced(policy, policy.stages)


def of_ms_swift() -> Recorded:
    """Supervised: steps, and passes for evaluation in between."""
    policy, recorded = Policy(), Recorded()
    for step, number in enumerate((2, 3, 1, 2, 4)):
        policy.update(step, number, recorded)
        recorded.losses.append(policy.log_probs(50, 2))
    return recorded


def of_nemo_rl() -> Recorded:
    """The reference model is built with DDP, after the policy; routers are frozen, and samples are not packed."""
    policy = Policy(freezes_router=True, packs=False)
    return reinforced(policy, Policy(freezes_router=True).stages)


def enter_verl(folder: Path) -> None:
    """``import verl`` loads plug-ins; the worker imports the engine later."""
    package = folder / "verl/workers/engine/megatron"
    package.mkdir(parents=True, exist_ok=True)
    for parent in ("verl", "verl/workers", "verl/workers/engine", "verl/workers/engine/megatron"):
        (folder / parent / "__init__.py").touch()
    (package / "transformer_impl.py").write_text("from megatron.core.distributed import DistributedDataParallel\n")
    sys.path.insert(0, str(folder))
    importlib.import_module("verl")
    EntryPoint("lancet", "megatron_lancet.library.launchers.verl", "verl.plugins").load()
    assert not launchers._installed
    importlib.import_module("verl.workers.engine.megatron.transformer_impl")


def enter_slime(folder: Path) -> None:
    """A function by its path, called with the arguments when Megatron is initialised."""
    path, name = "megatron_lancet.library.launchers.slime.install".rsplit(".", 1)
    getattr(importlib.import_module(path), name)(object())


class Callback:
    """ms-swift's base class of callbacks."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def enter_ms_swift(folder: Path) -> None:
    """A file of the user's, imported from its folder by its name."""
    stand_in: Any = ModuleType("swift.megatron.callbacks")
    stand_in.MegatronCallback, stand_in.megatron_callbacks_map = Callback, {}
    for name in ("swift", "swift.megatron"):
        sys.modules[name] = ModuleType(name)
    sys.modules[stand_in.__name__] = stand_in
    (folder / "my_plugin.py").write_text("from megatron_lancet.library.launchers.ms_swift import install\ninstall()\n")
    sys.path.insert(0, str(folder))
    importlib.import_module("my_plugin")


def leave_ms_swift() -> None:
    sys.modules["swift.megatron.callbacks"].megatron_callbacks_map["lancet"](object()).on_train_end()


def enter_nemo_rl(folder: Path) -> None:
    """A line in the module of the worker."""
    from megatron_lancet.library.launchers.nemo_rl import install

    install()


ENTER = {"verl": enter_verl, "slime": enter_slime, "ms-swift": enter_ms_swift, "NeMo-RL": enter_nemo_rl}
TRAIN = {"verl": of_verl, "slime": of_slime, "ms-swift": of_ms_swift, "NeMo-RL": of_nemo_rl}


def found_in(launcher: str, flags: str, folder: Path) -> dict[str, Any]:
    """The largest differences from stock, and what the overlap counted."""
    os.environ.pop("LANCET_FLAGS", None)
    expected = TRAIN[launcher]()
    os.environ["LANCET_FLAGS"] = flags
    ENTER[launcher](folder)
    overlap = launchers._installed[0]
    found = TRAIN[launcher]()
    assert found.tensors.keys() == expected.tensors.keys()
    records = overlap._run.recorder.records
    total = torch.tensor(found.num_tokens)
    dist.all_reduce(total)
    result = {
        "num_apart": sum(not torch.equal(found.tensors[name], expected.tensors[name]) for name in found.tensors),
        "num_tensors": len(found.tensors),
        "losses": found.losses == expected.losses,
        "num_steps": overlap.num_steps_done,
        "tokens": [sum(record.num_tokens for record in records), total.item()],
        "plan": overlap.plan_text,
        "peak_dw_bytes": max(record.comm.peak_dw_bytes for record in records),
    }
    (leave_ms_swift if launcher == "ms-swift" else launchers.close)()
    assert not launchers._installed
    return result


def refusal(flags: str) -> str:
    """What a launcher sees when DDP wraps its model."""
    from megatron_lancet.errors import UsageError

    os.environ["LANCET_FLAGS"] = flags
    enter_slime(Path())
    try:
        Policy()
    except UsageError as error:
        return str(error)
    finally:
        launchers.close()
    return "not refused"


def main() -> None:
    cases, refused, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    with cpu_platform():
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.pipeline_parallel import schedules

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        before = DistributedDataParallel.__init__, schedules.forward_backward_no_pipelining
        folder = out.parent / f"rank{dist.get_rank()}"
        folder.mkdir()
        found = {name: found_in(launcher, flags, folder) for name, (launcher, flags) in cases.items()}
        found["refused"] = {flags: refusal(flags) for flags in refused}
        assert before == (DistributedDataParallel.__init__, schedules.forward_backward_no_pipelining)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A training loop on Megatron-Core, stock and with ``Overlap``; its calls have the order of a launcher's."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.errors import UsageError
from megatron_lancet.features.tuning import race
from megatron_lancet.patching import replaced
from megatron_lancet.training.megatron.patches import fused_core_attention
from tests.small_gpt import EXPERTS, SEQ_LENGTH, VOCAB, small_gpt, transformer_config

MICRO_BATCH, NUM_MICRO_BATCHES, FEW_STEPS = 4, 2, 3


def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1)
    for _ in range(NUM_MICRO_BATCHES):
        tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LENGTH + 1), generator=generator)
        yield {"input_ids": tokens[:, :-1], "position_ids": positions, "labels": tokens[:, 1:]}


def rows_of_documents(step: int) -> Iterator[dict[str, Any]]:
    """Documents of unlike lengths end to end, in another number of tokens in each micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for _ in range(NUM_MICRO_BATCHES):
        lengths = torch.randint(2, SEQ_LENGTH + 1, (MICRO_BATCH,), generator=generator)
        tokens = torch.randint(VOCAB, (1, int(lengths.sum()) + 1), generator=generator)
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        yield {
            "input_ids": tokens[:, :-1],
            "position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None],
            "labels": tokens[:, 1:],
            "packed_seq_params": PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest),
        }


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    """Without ``return_schedule_plan``, which Megatron's own overlap needs."""
    output = model(attention_mask=None, **next(data))

    def loss_of(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_of


def sum_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(gradient)
    return gradient


class Root(torch.nn.Module):
    """Holds a language model, as the root of a vision-language model does."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model
        self.config, self.model_type = language_model.config, language_model.model_type

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def forward(self, **inputs: Any) -> Any:
        return self.language_model(**inputs)


class Training:
    """A model with DDP, an optimizer, and steps by Megatron's schedule.

    Args:
        overlap: the overlap; it is called as a hook, unless it is installed.
        is_nested: whether the language model is a part of the model.
        is_packed: whether samples are documents, end to end.
        has_hook: whether a weight has a gradient hook.
    """

    def __init__(
        self,
        overlap: Any = None,
        is_hook: bool = True,
        is_nested: bool = False,
        is_packed: bool = False,
        has_hook: bool = True,
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        self._batches = rows_of_documents if is_packed else batches
        config = transformer_config(**{**EXPERTS, "expert_model_parallel_size": 2})
        # Megatron's local attention has no documents; ours takes the place of stock's as well.
        with fused_core_attention(is_packed and overlap is None):
            stages: list[Any] = [small_gpt(config)]
        hooked = stages[0].decoder.layers[1].self_attention.linear_proj.weight
        if has_hook:
            hooked.register_hook(sum_over_ranks)  # as on adapters that all experts share in Megatron-Bridge
        stages = [Root(stages[0])] if is_nested else stages
        if overlap is not None and is_hook:
            assert overlap(stages) is stages
        self.ddp = DistributedDataParallel(config, ddp_config(), stages[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.ddp.no_sync
        config.grad_scale_func, config.timers = None, None
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, clip_grad=1.0), [self.ddp]
        )

    def forward_backward(self, step: int, forward_only: bool = False) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._batches(step),
            model=[self.ddp],
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )
        return torch.stack([result["loss"] for result in results]).mean().item()

    def step(self, number: int) -> tuple[float, dict[str, torch.Tensor]]:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.forward_backward(number)
        gradients = {name: weight.main_grad.clone() for name, weight in self.ddp.module.named_parameters()}
        assert self.optimizer.step()[0]
        return loss, gradients


def ddp_config() -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=4000
    )


def compared(stock: Training, ours: Training, num_steps: int) -> dict[str, Any]:
    """Largest differences in some steps, with passes without gradients and another model's steps in between."""
    other = Training()
    losses, worst = [], 0.0
    for number in range(num_steps):
        (expected, wanted), (loss, found) = stock.step(number), ours.step(number)
        assert found.keys() == wanted.keys()
        worst = max(worst, *(_apart(found[name], wanted[name]) for name in wanted))
        losses.append(abs(loss - expected))
        if number < FEW_STEPS:
            losses.append(abs(ours.forward_backward(7, True) - stock.forward_backward(7, True)))
            other.step(number)
    weights = dict(stock.ddp.module.named_parameters())
    apart = [_apart(weight, weights[name]) for name, weight in ours.ddp.module.named_parameters()]
    return {"loss": max(losses), "gradient": worst, "weight": max(apart)}


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def found_in(case: dict[str, Any]) -> dict[str, Any]:
    """What a training with the case's overlap shows next to one of stock."""
    import megatron_lancet

    overlap_class: Any = megatron_lancet.Overlap
    is_hook, is_nested, is_packed = case["way"] != "install", case["way"] == "nested", case["way"] == "packed"
    num_steps = case.get("num_steps", FEW_STEPS)
    with overlap_class(
        ddp_config() if is_hook else None,
        micro_batch_size=MICRO_BATCH,
        seq_length=SEQ_LENGTH,
        num_micro_batches=NUM_MICRO_BATCHES,
        num_steps=num_steps,
        packed_samples=is_packed,
        **case["settings"],
    ) as overlap:
        if not is_hook:
            overlap.install()
        ours = Training(overlap, is_hook, is_nested, is_packed, dist.get_rank() in case.get("hooked", (0, 1)))
        found = compared(Training(is_nested=is_nested, is_packed=is_packed), ours, num_steps)
        found |= {"line": overlap.line, "plan": overlap.plan_text, "num_steps": overlap.num_steps_done}
        if overlap._run is not None:
            times = overlap._run.recorder.records[-1].comm
            found |= {"num_all_to_alls": times.num_all_to_alls, "peak_dw_bytes": times.peak_dw_bytes}
    return found


def all_found(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is found for each case, by its name; each prints its name first."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    before, found = schedules.forward_backward_no_pipelining, {}
    with replaced(race, "MAX_TURNS", 3), replaced(race, "MAX_TIED_TURNS", 3):  # equal plans take more turns
        for name, case in cases.items():
            sys.stdout.write(f"case {name}\n")
            try:
                found[name] = found_in(case)
            except UsageError as error:
                found[name] = {"refused": str(error)}
            assert schedules.forward_backward_no_pipelining is before
    return found

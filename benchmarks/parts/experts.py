"""Experts of a rank one after the other, or layer by layer: where model/local_experts groups, and why.

    OMP_NUM_THREADS=1 python -m benchmarks.parts.experts [--repeats 21] [--output FILE.json]

Both are the modules that train: forward, backward and deferred dW of Megatron's sequential experts with our linear
layers, and the same with one function for a layer of all experts. Gradients are compared before timing. They take turns
in random order; the ratio is the median of the paired ratios, above 1 where grouped is faster. One process, no
communication.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.parts.frame import (
    megatron_ranks,
    new_parser,
    paired_ratios,
    parsed,
    rounded,
    timed_ms,
    timed_pairs,
    write_result,
)
from megatron_lancet.patching import replaced


@dataclass(frozen=True)
class Case:
    """Local experts, rows of each, hidden and feed-forward size."""

    num_experts: int
    rows: int
    hidden: int
    ffn: int
    dtype: str = "float32"


CASES = [
    Case(2, 16, 128, 256),
    Case(2, 64, 256, 1024),
    Case(2, 256, 512, 2048),
    Case(4, 8, 64, 128),
    Case(4, 16, 128, 256),
    Case(4, 128, 128, 256),
    Case(4, 512, 128, 256),
    Case(4, 128, 256, 1024),
    Case(4, 512, 256, 1024),
    Case(8, 16, 192, 256),
    Case(8, 128, 256, 512),
    Case(8, 256, 256, 512),
    Case(32, 2, 128, 256),
    Case(32, 16, 128, 256),
    Case(32, 128, 128, 256),
    Case(32, 256, 128, 256),
    Case(32, 8, 256, 512),
    Case(32, 128, 256, 512),
    Case(32, 256, 256, 512),
    Case(32, 16, 128, 256, "bfloat16"),
    Case(32, 16, 256, 256, "bfloat16"),
]


class Experts:
    """A rank's experts with a store of their own."""

    def __init__(self, case: Case) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP

        from megatron_lancet.model.adopt import adopt
        from megatron_lancet.model.linear import can_defer, defer_weight_grad
        from megatron_lancet.model.local_experts.module import GroupingSequentialMLP
        from megatron_lancet.runtime.comm_stats import CommStats
        from megatron_lancet.runtime.weight_grad_store import WeightGradStore
        from megatron_lancet.schedule.dw_queue import DwRules

        dtype = getattr(torch, case.dtype)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=case.hidden,
            num_attention_heads=4,
            ffn_hidden_size=case.ffn,
            num_moe_experts=case.num_experts,
            add_bias_linear=False,
            bias_activation_fusion=False,
            params_dtype=dtype,
        )
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.module = adopt(
            SequentialMLP(case.num_experts, config, linears, pg_collection=groups), GroupingSequentialMLP
        )
        store = WeightGradStore(DwRules(window=1), CommStats(torch.device("cpu")))
        for linear in [part for part in self.module.modules() if can_defer(part)]:
            linear.weight.main_grad = torch.zeros(linear.weight.shape)
            defer_weight_grad(linear, "W", store)
            linear.register_wgrad_accumulation_and_reduce_hooks(
                lambda weight=linear.weight: weight.__setattr__("grad", None)
            )
        num_rows = case.num_experts * case.rows
        self.tokens = torch.randn(num_rows, case.hidden, dtype=dtype, requires_grad=True)
        self.probs = torch.rand(num_rows, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(num_rows, case.hidden, dtype=dtype)
        self.sizes = torch.full((case.num_experts,), case.rows)

    def step(self, grouped: bool) -> None:
        """Forward, backward and dW."""
        from megatron_lancet.model.local_experts import module as experts

        with replaced(experts, "grouped_is_faster", lambda *_: grouped):
            output, _ = self.module(self.tokens, self.sizes, self.probs)
            output.backward(self.grad)

    def gradients(self, grouped: bool) -> list[torch.Tensor]:
        """Of the weights and of the tokens."""
        weights = list(self.module.parameters())
        for weight in weights:
            weight.main_grad.zero_()
        self.tokens.grad = None
        self.step(grouped)
        assert self.tokens.grad is not None
        return [self.tokens.grad.clone(), *(weight.main_grad.clone() for weight in weights)]


def measure(case: Case, num_repeats: int) -> dict[str, Any]:
    """Time one case, print it, and return it for the JSON file."""
    from megatron_lancet.model.local_experts.module import grouped_is_faster

    experts = Experts(case)
    for loop, grouped in zip(experts.gradients(False), experts.gradients(True), strict=True):
        torch.testing.assert_close(grouped, loop)
    steps: dict[str, Callable[[], float]] = {
        name: partial(_step_us, experts, is_grouped) for name, is_grouped in (("sequential", False), ("grouped", True))
    }
    samples = timed_pairs(steps, num_repeats)
    medians = {name: round(statistics.median(times), 1) for name, times in samples.items()}
    ratio = round(paired_ratios(samples["sequential"], samples["grouped"]).median, 3)
    chosen = grouped_is_faster(case.num_experts, case.num_experts * case.rows)
    shape = f"{case.num_experts} x {case.rows} rows, {case.hidden} x {case.ffn} {case.dtype}"
    print(f"{shape:40} {medians['sequential']:10.1f} {medians['grouped']:10.1f} {ratio:6.2f} {chosen}", flush=True)
    return {
        "case": asdict(case),
        "median_us": medians,
        "median_ratio": ratio,
        "chosen": chosen,
        "samples_us": rounded(samples, 1),
    }


def _step_us(experts: Experts, grouped: bool) -> float:
    return 1e3 * timed_ms(lambda: experts.step(grouped))


def main() -> None:
    """Measure and print."""
    parser = new_parser(__doc__, repeats=21)
    args = parsed(parser, "experts")
    with megatron_ranks():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        print(f"{'experts':40} sequential    grouped  ratio chosen (us)")
        cases = [measure(case, args.repeats) for case in CASES]
    write_result(args, {"threads": torch.get_num_threads(), "cases": cases})


if __name__ == "__main__":
    main()

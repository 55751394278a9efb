"""Experts of a rank one after the other, or layer by layer: where model/experts.py groups, and why.

    OMP_NUM_THREADS=1 python benchmarks/parts/experts.py [--repeats 21] [--output FILE.json]

Both are the modules that train: forward, backward and deferred dW of Megatron's sequential experts with our linear
layers, and the same with one function for a layer of all experts. Gradients are compared before timing. They take turns
in random order; the ratio is the median of the paired ratios, above 1 where grouped is faster. One process, no
communication.
"""

import argparse
import json
import logging
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lancet.patching import replaced
from megatron_lancet.training.platform.cpu import cpu_platform


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
        from megatron_lancet.model.experts import GroupingSequentialMLP
        from megatron_lancet.model.linear import can_defer, defer_weight_grad
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

    def step_us(self, grouped: bool) -> float:
        """Forward, backward and dW."""
        from megatron_lancet.model import experts

        with replaced(experts, "grouped_is_faster", lambda *_: grouped):
            start_s = time.perf_counter()
            output, _ = self.module(self.tokens, self.sizes, self.probs)
            output.backward(self.grad)
            return (time.perf_counter() - start_s) * 1e6

    def gradients(self, grouped: bool) -> list[torch.Tensor]:
        """Of the weights and of the tokens."""
        weights = list(self.module.parameters())
        for weight in weights:
            weight.main_grad.zero_()
        self.tokens.grad = None
        self.step_us(grouped)
        assert self.tokens.grad is not None
        return [self.tokens.grad.clone(), *(weight.main_grad.clone() for weight in weights)]


def measure(case: Case, num_repeats: int) -> dict[str, Any]:
    """Time one case, print it, and return it for the JSON file."""
    from megatron_lancet.model.experts import grouped_is_faster

    experts = Experts(case)
    for loop, grouped in zip(experts.gradients(False), experts.gradients(True), strict=True):
        torch.testing.assert_close(grouped, loop)
    samples: dict[str, list[float]] = {"sequential": [], "grouped": []}
    dice = random.Random(0)  # noqa: S311
    for _ in range(num_repeats):
        for name in dice.sample(list(samples), 2):
            samples[name].append(experts.step_us(name == "grouped"))
    medians = {name: round(statistics.median(times), 1) for name, times in samples.items()}
    ratio = round(statistics.median(a / b for a, b in zip(*samples.values(), strict=True)), 3)
    chosen = grouped_is_faster(case.num_experts, case.num_experts * case.rows, next(experts.module.parameters()))
    shape = f"{case.num_experts} x {case.rows} rows, {case.hidden} x {case.ffn} {case.dtype}"
    print(f"{shape:40} {medians['sequential']:10.1f} {medians['grouped']:10.1f} {ratio:6.2f} {chosen}", flush=True)
    rounded = {name: [round(us, 1) for us in times] for name, times in samples.items()}
    return {"case": asdict(case), "median_us": medians, "median_ratio": ratio, "chosen": chosen, "samples_us": rounded}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21, help="of each variant in each case (21)")
    parser.add_argument("--output", type=Path, help="JSON with every sample")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # Megatron's, of every model that is built
    with cpu_platform():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        print(f"{'experts':40} sequential    grouped  ratio chosen (us)")
        cases = [measure(case, args.repeats) for case in CASES]
        dist.destroy_process_group()
    if args.output is not None:
        where = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        args.output.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **where, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()

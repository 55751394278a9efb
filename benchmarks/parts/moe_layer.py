"""One MoE layer, forward and backward: stock Megatron's, ours with one and two chunks, and DeepSpeed's.

    OMP_NUM_THREADS=1 python -m benchmarks.parts.moe_layer --output results.json
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.parts.moe_layer --output results.json    # EP=2

Router, dispatch, experts, combine and their gradients, with the same weights and tokens; outputs and gradients are
compared with stock's before timing. The layers take turns in random order; a step's time is the slower rank's,
and the ratio is the median of the paired ratios, above 1 where a layer is faster than stock's.

Not the same for DeepSpeed: it pads every expert's rows to the longest, because it is told to drop no token; it computes
a balancing loss, which is not used; and its gradients stay in ``.grad``, while Megatron's data parallelism adds them to
a buffer in both others.
"""

import contextlib
import importlib.util
import os
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gradient_error import relative_error
from benchmarks.parts.frame import megatron_ranks, new_parser, paired_ratios, parsed, rounded, timed_pairs, write_result
from megatron_lancet.schedule.plan import OverlapRange, Plan, fixed_plan

STOCK, DEEPSPEED = "stock", "deepspeed"
PLANS: dict[str, Plan | None] = {
    STOCK: None,
    **{f"ours k={k}": fixed_plan(k, overlap_range=OverlapRange.GATE) for k in (1, 2)},
}
TOLERANCE = 2e-5
"""Of outputs and gradients relative to their norm, fp32: only the order of sums differs."""
_MICRO_BATCH = 4
_NUM_WARMUP = 3
_DEEPSPEED_MISSING = "deepspeed is not installed (pip install megatron-lancet[peers])"


@dataclass(frozen=True)
class Case:
    """Tokens of a rank, hidden and feed-forward size, experts of all ranks, experts per token."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.hidden} x {self.ffn}, {self.experts} experts, top-{self.top_k}"


CASES = [
    Case(1024, 512, 2048, 4, 1),
    Case(1024, 512, 2048, 4, 2),
    Case(1024, 256, 512, 8, 2),
    Case(1024, 128, 256, 32, 4),
]


class MegatronLayer:
    """The MoE layer of a model that Megatron built, stock or by a plan."""

    def __init__(self, case: Case, plan: Plan | None) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from megatron_lancet.runtime.comm_stats import CommStats
        from megatron_lancet.training.overlap_setup import OverlapSetup

        self._plan = plan
        model, config = _build(case)
        if plan is not None:
            cpu = torch.device("cpu")
            OverlapSetup(plan, cpu, CommStats(cpu), timedelta(minutes=5))([model])
        self._block = model.decoder
        self._moe = model.decoder.layers[0].mlp
        self._ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(delay_wgrad_compute=plan is not None), model
        )

    def reset(self) -> None:
        """Clears the gradients."""
        self._ddp.zero_grad_buffer()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, B, H] to [S, B, H]."""
        from megatron_lancet.model.chunking import Chunk
        from megatron_lancet.model.ops import ChunkState

        if self._plan is None:
            return self._moe(hidden)[0]
        self._block._begin_micro_batch(documents=None)
        micro_batch = ChunkState(Chunk(0, 1))
        micro_batch.normed_sbH = hidden
        # In the range that the plans have, attention is the first instruction and the residual the last.
        _, *experts, _ = self._block.segments[0].program
        replace(self._block.segments[0], program=experts).run(micro_batch, trace=None)
        return micro_batch.output_sbH

    def weights(self) -> list[torch.nn.Parameter]:
        """Router, then both matrices of each local expert."""
        experts = self._moe.experts.local_experts
        return [self._moe.router.weight, *(w for e in experts for w in (e.linear_fc1.weight, e.linear_fc2.weight))]

    def gradients(self) -> list[torch.Tensor]:
        """Of the weights, in their order."""
        return [weight.main_grad for weight in self.weights()]  # type: ignore[attr-defined]


class DeepSpeedLayer:
    """DeepSpeed's MoE layer with the weights of another one."""

    def __init__(self, case: Case, other: MegatronLayer) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with _silent():
            import deepspeed
            from deepspeed.moe.layer import MoE

            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
            self._moe = MoE(
                case.hidden,
                _Expert(case),
                num_experts=case.experts,
                ep_size=dist.get_world_size(),
                k=case.top_k,
                drop_tokens=False,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
            self._moe.set_deepspeed_parallelism()
        with torch.no_grad():
            for own, theirs in zip(self.weights(), other.weights(), strict=True):
                own.copy_(theirs)

    def reset(self) -> None:
        """Clears the gradients."""
        self._moe.zero_grad()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, B, H] to [S, B, H]."""
        return self._moe(hidden)[0]

    def weights(self) -> list[torch.nn.Parameter]:
        """Router, then both matrices of each local expert."""
        experts = self._moe.deepspeed_moe.experts.deepspeed_experts
        return [self._moe.deepspeed_moe.gate.wg.weight, *(w for e in experts for w in (e.fc1.weight, e.fc2.weight))]

    def gradients(self) -> list[torch.Tensor]:
        """Of the weights, in their order."""
        gradients = [weight.grad for weight in self.weights()]
        assert None not in gradients
        return gradients  # type: ignore[return-value]


class _Expert(torch.nn.Module):
    """Megatron's expert as a plain module."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(case.hidden, case.ffn, bias=False)
        self.fc2 = torch.nn.Linear(case.ffn, case.hidden, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(rows)))


Layer = MegatronLayer | DeepSpeedLayer


@contextlib.contextmanager
def _silent() -> Any:
    """DeepSpeed prints what it does."""
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        yield


def _build(case: Case) -> Any:
    """A GPT of one MoE layer, and its config."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=4,
        ffn_hidden_size=case.ffn,
        num_moe_experts=case.experts,
        moe_router_topk=case.top_k,
        moe_router_pre_softmax=case.top_k == 1,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="LayerNorm")
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=case.tokens), config


class Input:
    """A rank's tokens and the gradient of the layer's output, both [S, B, H]."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (case.tokens // _MICRO_BATCH, _MICRO_BATCH, case.hidden)
        self.hidden = torch.randn(shape, generator=generator).requires_grad_()
        self.grad = torch.randn(shape, generator=generator)

    def step_ms(self, layer: Layer) -> float:
        """Forward and backward; time of the slowest rank."""
        layer.reset()
        self.hidden.grad = None
        dist.barrier()
        start_s = time.perf_counter()
        layer.forward(self.hidden).backward(self.grad)
        elapsed_ms = torch.tensor((time.perf_counter() - start_s) * 1e3)
        dist.all_reduce(elapsed_ms, op=dist.ReduceOp.MAX)
        return elapsed_ms.item()

    def results(self, layer: Layer) -> list[torch.Tensor]:
        """Output, gradient of the input and of every weight."""
        layer.reset()
        self.hidden.grad = None
        output = layer.forward(self.hidden)
        output.backward(self.grad)
        assert self.hidden.grad is not None
        return [output.detach(), self.hidden.grad, *(gradient.clone() for gradient in layer.gradients())]


def deviation(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest of all results, each relative to the norm of what is expected."""
    return max(relative_error(own, true) for own, true in zip(results, expected, strict=True))


def measure(case: Case, num_repeats: int) -> dict[str, Any]:
    """Compare and time all layers on one case; what goes into the file."""
    layers: dict[str, Layer] = {name: MegatronLayer(case, plan) for name, plan in PLANS.items()}
    stock = layers[STOCK]
    assert isinstance(stock, MegatronLayer)
    if importlib.util.find_spec("deepspeed") is not None:
        layers[DEEPSPEED] = DeepSpeedLayer(case, stock)
    given = Input(case)
    for _ in range(_NUM_WARMUP):
        for layer in layers.values():
            given.step_ms(layer)
    expected = given.results(stock)
    deviations = {name: deviation(given.results(layer), expected) for name, layer in layers.items()}
    for name, found in deviations.items():
        if not found <= TOLERANCE:
            raise RuntimeError(f"{case}: {name} deviates from stock by {found:.2g}, at most {TOLERANCE} was expected")
    samples = timed_pairs({name: partial(given.step_ms, layer) for name, layer in layers.items()}, num_repeats)
    rows = {name: _row(samples[STOCK], times) | {"deviation": deviations[name]} for name, times in samples.items()}
    return {"case": asdict(case), "summary": rows, "samples_ms": rounded(samples, 3)}


def _row(stock_ms: list[float], own_ms: list[float]) -> dict[str, float]:
    ratio = paired_ratios(stock_ms, own_ms)
    return {
        "median_ms": statistics.median(own_ms),
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


def show(case: Case, found: dict[str, Any]) -> None:
    """Print one case."""
    print(f"\n{case}{'':8}median ms   stock / it (quartiles)   deviation")
    for name, row in found["summary"].items():
        ratio = f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
        print(f"  {name:12}{row['median_ms']:10.2f}   {ratio:>24}   {row['deviation']:.1e}", flush=True)
    if DEEPSPEED not in found["summary"]:
        print(f"  {DEEPSPEED:12}  skipped: {_DEEPSPEED_MISSING}")


def main() -> None:
    """Measure and print."""
    parser = new_parser(__doc__, repeats=21)
    every_case = list(range(len(CASES)))
    parser.add_argument(
        "--cases", type=int, nargs="+", choices=every_case, default=every_case, help="rows of the table (all)"
    )
    args = parsed(parser, "moe_layer", [DEEPSPEED])
    warnings.simplefilter("ignore")  # Megatron names every package that it could use
    with megatron_ranks():
        num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
        cases = []
        for case in (CASES[index] for index in args.cases):
            cases.append(measure(case, args.repeats))
            if is_first:
                show(case, cases[-1])
    if is_first:
        found = {"ranks": num_ranks, "threads": torch.get_num_threads(), "cases": cases}
        write_result(args, found)


if __name__ == "__main__":
    main()

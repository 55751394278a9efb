"""Stock modules with Megatron's own overlap train like Megatron's own script, or fail with a one-line error."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lancet.errors import UsageError
from megatron_lancet.patching import around, replaced
from megatron_lancet.training.platform.cuda_connections import CONNECTIONS
from tests.parity.runs.spec_worker import pretrain_gpt
from tests.parity.stock_overlap.rows import FOLDER, REFUSED, ROWS, Refused, Row
from tests.ranks import launch
from tests.ranks.pretrain_worker import recording
from tests.ranks.pretraining import SHORT_RUN, TINY_MODEL

pytestmark = pytest.mark.distributed
# Megatron's own pairing needs Transformer Engine layers in bf16; a step has four micro-batches.
SETTINGS = (
    "--transformer-impl transformer_engine --moe-grouped-gemm --disable-bias-linear --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --bf16 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 2"
).split()
OURS = ["--lancet-cache", "off"]
MEGATRONS = [*TINY_MODEL, *SHORT_RUN[: SHORT_RUN.index(OURS[0])], *SETTINGS]


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Builds Megatron's data sets, on every rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_and_blend_per_split(args)[0],
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


setattr(datasets, "is_distributed", True)  # noqa: B010 - mypy rejects attributes of functions


def loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = torch.sum(losses.view(-1).float() * mask.view(-1))
    num_tokens = mask.sum().int()
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Forward step with the interface of Megatron's own script."""
    sample = next(iterator)
    inputs = [sample["tokens"], sample["position_ids"], sample.get("attention_mask")]
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(*inputs, labels=sample["labels"], loss_mask=sample["loss_mask"]), partial(loss, sample["loss_mask"])


def as_stock() -> None:
    pretrain_gpt(datasets, forward_step)


def as_ours() -> None:
    from megatron_lancet.registry import features
    from megatron_lancet.training.job import run_job
    from megatron_lancet.training.process.exit import RankStatus

    run_job(torch.device("cpu"), RankStatus(), features=features())


@contextmanager
def anew() -> Iterator[None]:
    """Gives Megatron the global state of a new process, but keeps the default process group."""
    from megatron.core.pipeline_parallel import utils
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import training

    environment = dict(os.environ)
    try:
        yield
    finally:
        training.destroy_global_state()
        destroy_moe_metrics_tracker()
        utils._COMM_STREAM = None
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def gpu_flags_kept() -> Iterator[None]:
    """Lets CPU settings accept CUDA graphs: Megatron captures them only after warm-up steps."""
    from megatron_lancet.training import job
    from megatron_lancet.training.platform import detect

    def apply(stock: Callable[[Any], None], args: Any) -> None:
        graphs, args.cuda_graph_impl = args.cuda_graph_impl, "none"
        stock(args)
        args.cuda_graph_impl = graphs

    with around(detect, "apply_cpu_settings", apply), around(job, "apply_cpu_settings", apply):
        yield


def outcome(run: Callable[[], None], command: list[str], only_warms_up: bool) -> dict[str, Any]:
    """Executes a run and returns its outcome.

    Returns:
        Losses, packages of the model's classes and the number of Megatron's schedules, or the refusal.
    """
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.training import training

    losses: list[dict[str, float]] = []
    classes: set[str] = set()
    schedules: list[int] = []

    def scheduled(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        schedules.append(len(losses))
        stock(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(sys, "argv", [sys.argv[0], *command]))
        stack.enter_context(anew())
        stack.enter_context(gpu_flags_kept() if only_warms_up else nullcontext())
        stack.enter_context(around(TransformerModelChunkSchedulePlan, "__init__", scheduled))
        stack.enter_context(around(training, "train_step", recording(losses, classes)))
        try:
            run()
        except UsageError as refusal:
            assert not losses, "refused after its start"
            return {"refused": str(refusal)}
    packages = sorted({name.partition(".")[0] for name in classes})
    return {"losses": losses, "packages": packages, "num_schedules": len(schedules)}


def outcomes(file: str) -> dict[str, Any]:
    """The outcome of each run of a JSON file: ``ours`` or ``stock``, a command line, and whether the run only warms up.

    All runs share one process and its default process group.
    """
    from megatron_lancet.training import job

    runs = json.loads(Path(file).read_text())
    results: dict[str, Any] = {}
    with around(job.dist, "destroy_process_group", lambda stock, group=None: group and stock(group)):
        for name, (entry, command, only_warms_up) in runs.items():
            # Megatron requires 1 with tensor parallelism and forbids it with FSDP.
            os.environ[CONNECTIONS] = "1" if "--tensor-model-parallel-size" in command else "32"
            run = as_ours if entry == "ours" else as_stock
            results[name] = outcome(run, command, only_warms_up)
    return results


def runs_of(name: str, row: Row | Refused, data: Path) -> dict[str, tuple[str, list[str], bool]]:
    """Returns a row's run and its reference, in the worker's format."""
    command = [*map(str, MEGATRONS), "--data-path", str(data), *row.flags.replace(FOLDER, str(data.parent)).split()]
    ours = [*OURS, *(["--lancet-plan", "off"] if row.is_off else [])]
    if isinstance(row, Refused):
        return {f"refused: {name}": ("ours", [*command, *ours], False)}
    if row.without is None:
        reference = ("stock", command, row.only_warms_up)
    else:
        reference = ("ours", [*(word for word in command if word not in row.without.split()), *ours], False)
    return {name: ("ours", [*command, *ours], row.only_warms_up), f"reference: {name}": reference}


@pytest.fixture(scope="module")
def results(token_data, tmp_path_factory) -> dict[str, Any]:
    """Each run's results on the last rank, which has the losses even with pipeline stages."""
    found: dict[str, Any] = {}
    for num_ranks in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        rows = [(name, row) for table in (ROWS, REFUSED) for name, row in table.items() if row.num_ranks == num_ranks]
        runs = {key: run for name, row in rows for key, run in runs_of(name, row, token_data).items()}
        (folder / "runs.json").write_text(json.dumps(runs))
        file = str(folder / "runs.json")
        found |= launch.results_of(outcomes, num_ranks, folder, 400, [file], te=launch.Te())[-1]
    return found


@pytest.mark.parametrize("name", ROWS)
def test_own_overlap_of_stock_trains_as_its_reference(results, name):
    ours, reference = results[name], results[f"reference: {name}"]
    assert len(ours["losses"]) == 2
    assert {"lm loss", "grad norm"} <= ours["losses"][0].keys()
    assert ours["losses"] == reference["losses"]
    assert "megatron_lancet" not in ours["packages"]
    assert ours["num_schedules"] == ROWS[name].num_schedules


def test_losses_of_rows_differ_where_their_data_or_models_do(results):
    """Negative control: these rows differ from each other, so the comparison detects a different model."""
    names = ["pairs", "pairs, early release", "pairs of documents", "pairs of bins", "reason: experts", "userbuffers"]
    assert len({json.dumps(results[name]["losses"]) for name in names}) == len(names)


@pytest.mark.parametrize("name", REFUSED)
def test_stock_modules_that_cannot_run_are_refused_in_one_line(results, name):
    refusal = results[f"refused: {name}"]["refused"]
    assert REFUSED[name].message in refusal
    assert "\n" not in refusal

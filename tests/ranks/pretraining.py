"""Short runs of the real pretraining loop, and the figures they print."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import launch

WORKER = Path(__file__).with_name("pretrain_worker.py")

TINY_MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    "--moe-z-loss-coeff 1e-3 --attention-dropout 0 --hidden-dropout 0"
).split()
SHORT_RUN = (
    "--micro-batch-size 4 --global-batch-size 16 --lr 1e-3 --lr-decay-iters 40 --clip-grad 1.0 --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000 --split 9,1,0 --tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0 "
    "--lancet-cache off"
).split()
EP2 = ["--expert-model-parallel-size", "2"]


@dataclass(frozen=True)
class Run:
    """What a run printed and recorded.

    Attributes:
        losses: exact values per training step: ``lm loss``, ``grad norm``.
        model_modules: Python modules that the classes of the model's parts come from.
        logged: Megatron's log lines as dicts of floats, as far as they are numbers, per iteration.
        outputs: everything each rank printed.
    """

    losses: list[dict[str, float]]
    model_modules: list[str]
    logged: list[dict[str, float]]
    outputs: list[str]

    def series(self, name: str) -> list[float]:
        rows = self.losses if self.losses and name in self.losses[0] else self.logged
        return [row[name] for row in rows]


def pretrain(
    data: Path,
    extra: Sequence[object],
    folder: Path,
    num_ranks: int = 2,
    train_iters: int = 20,
    timeout_s: float = 150,
    te: bool = False,
    **env: str,
) -> Run:
    """Run the loop to its end.

    Args:
        data: prefix of a token data set.
        extra: arguments in addition to the tiny model's and the short run's; later ones win.
        te: the ranks have the tests' Transformer Engine, for ``--transformer-impl transformer_engine``.
        env: further environment variables.
    """
    result_file = folder / "result.json"
    arguments = command_line(data, ["--train-iters", train_iters, *extra])
    results = launch.run(
        WORKER, arguments, num_ranks, folder, timeout_s, {"LANCET_TEST_RESULT": str(result_file), **env}, te=te
    )
    launch.check(results)
    outputs = [result.output for result in results]
    result = json.loads(result_file.read_text())
    return Run(result["losses"], result["model_modules"], parse_log("\n".join(outputs)), outputs)


def command_line(data: Path, extra: Sequence[object]) -> list[object]:
    """Arguments of a short run of the tiny model; later ones win."""
    short_run = list(SHORT_RUN)
    if "--step-batch-size-schedule" in extra:
        at = short_run.index("--global-batch-size")  # Megatron takes one of the two
        del short_run[at : at + 2]
    return [*TINY_MODEL, *short_run, "--data-path", data, *extra]


def parse_log(text: str) -> list[dict[str, float]]:
    """Megatron's per-iteration log lines, as users' scripts read them."""
    rows = []
    for line in text.splitlines():
        if re.search(r"\] iteration +\d+/", line):
            pairs = re.findall(r"\| ?([a-z_\d ]+?)(?: \(ms\))?: +([-+.\dE]+)", line)
            rows.append({name.strip(): float(value) for name, value in pairs})
    return rows

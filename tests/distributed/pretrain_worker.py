"""pretrain_gpt_moe.py with its exact losses written down: LANCET_TEST_LOSSES names the file (rank 0 writes it)."""

import faulthandler
import functools
import json
import os
import signal
from pathlib import Path

from megatron_lancet.patching import wrapped
from megatron_lancet.training.pretrain import main


def recording(losses: list[dict[str, float]]):
    def wrap(stock):
        @functools.wraps(stock)
        def train_step(*args, **kwargs):
            result = stock(*args, **kwargs)
            loss_dict, grad_norm = result[0], result[5]
            losses.append({"grad norm": float(grad_norm), **{name: v.item() for name, v in loss_dict.items()}})
            kill_at = int(os.environ.get("LANCET_TEST_KILL_AFTER_STEP", "0"))
            if kill_at == len(losses) and os.environ["RANK"] == os.environ["LANCET_TEST_KILL_RANK"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return train_step

    return wrap


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from megatron.training import training

    losses: list[dict[str, float]] = []
    with wrapped(training, "train_step", recording(losses)):
        main()
    # The last pipeline stage knows the losses.
    if "LANCET_TEST_LOSSES" in os.environ and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        Path(os.environ["LANCET_TEST_LOSSES"]).write_text(json.dumps(losses))

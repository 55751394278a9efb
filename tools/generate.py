"""Continues a prompt with a checkpoint of pretrain_gpt_moe.py; the text appears token by token.

The checkpoint describes its model; pass only its folder and a prompt (an argument, a file, or standard input):

  lancet generate --load runs/demo/checkpoints --prompt "def read("
  torchrun --nproc-per-node 2 -m megatron_lancet generate --load ... --prompt-file prompt.txt    experts on two ranks

By default the next token is drawn from all of the model's distribution. A checkpoint of any number of expert-parallel
ranks runs on any other that divides the number of experts.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lancet.cli.arguments import positive_int, require_output_folder
from megatron_lancet.errors import UsageError
from megatron_lancet.files.atomic import atomic_write
from megatron_lancet.inference.command import run_tool
from megatron_lancet.inference.sampling import Sampling


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="checkpoint folder (--save of the training)")
    add("--step", type=positive_int, metavar="N", help="training step of the checkpoint (default: the latest)")
    add("--tokenizer-model", type=Path, metavar="FILE", help="current path of the tokenizer (default: as in training)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text to continue (default: read from standard input)")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text to continue")
    add("--max-tokens", type=positive_int, default=100, metavar="N", help="at most N new tokens (default: %(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="below 1 sharper, 0 as --greedy (default: 1)")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that have probability P together")
    add("--top-k", type=positive_int, metavar="K", help="draw among the K likeliest tokens")
    add("--greedy", action="store_true", help="always take the likeliest token")
    add("--seed", type=int, default=0, metavar="N", help="random seed: same seed, same text (default: %(default)s)")
    add("--ignore-end", action="store_true", help="continue after an end-of-document token")
    add("--output", type=Path, metavar="FILE", help="also write prompt, text and tokens to FILE, as JSON")
    return parser.parse_args(argv)


def read_prompt(arguments: argparse.Namespace) -> str:
    """Reads the prompt from the flag, the file or standard input.

    Raises:
        UsageError: the file can't be read, or is not UTF-8 text; or several ranks would share standard input.
    """
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.prompt_file is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("standard input reaches only one of several ranks: pass --prompt or --prompt-file.")
    try:
        if arguments.prompt_file is not None:
            return str(arguments.prompt_file.read_text(encoding="utf-8"))
        return sys.stdin.read()
    except OSError as error:
        raise UsageError(f"--prompt-file: can't read {arguments.prompt_file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt must be UTF-8; it is not at byte {error.start}.") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command on each rank."""
    arguments = parse_arguments(argv)
    prompt = read_prompt(arguments)
    if arguments.output is not None:
        require_output_folder(arguments.output)
    sampling = Sampling(
        temperature=0.0 if arguments.greedy else arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    from megatron_lancet.inference.generate import generate, prompt_ids  # imports torch, so after the checks above
    from megatron_lancet.inference.session import Session

    session = Session.open(arguments.load, arguments.step, arguments.tokenizer_model)
    prompt_ids(session.tokenizer, prompt, session.context_length)  # checks the prompt before the weights are read
    with session.model() as model:

        def show(text: str) -> None:
            if model.rank == 0:
                sys.stdout.write(text)
                sys.stdout.flush()

        show(prompt)
        result = generate(
            model, session.tokenizer, prompt, sampling, arguments.max_tokens, show, stop_at_end=not arguments.ignore_end
        )
        show("\n")
        rank = model.rank
    if rank != 0:
        return
    print(f"[{len(result.tokens)} tokens, {result.ended}]", file=sys.stderr)
    if arguments.output is not None:
        content = {"prompt": result.prompt, "text": result.text, "tokens": result.tokens, "ended": str(result.ended)}
        atomic_write(arguments.output, json.dumps({"iteration": session.run.iteration, **content}, indent=2) + "\n")


if __name__ == "__main__":
    run_tool(main, "generating")

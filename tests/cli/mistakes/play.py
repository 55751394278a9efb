"""Plays mistakes: each in a process of its own, which begins with torch and Megatron imported."""

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.synthetic_profile import Machine, synthetic_profile
from megatron_lancet.planning.plan_file import PlanFile, made_for, write_plan_file
from megatron_lancet.schedule.plan import fixed_plan
from tests.cli.mistakes.cases import Mistake
from tests.ranks import launch
from tests.ranks.pretraining import EP2, command_line

WITHIN_S = 60
"""Of a busy machine; most take less than half a second."""
NUM_AT_A_TIME = 2
_COMMAND = launch.REPO / "megatron_lancet" / "__main__.py"
_TRAINING = launch.REPO / "pretrain_gpt_moe.py"
_TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --micro-batch-size 2 "
    "--tokenizer-type NullTokenizer --vocab-size 500 --mock-data --eval-interval 10"
).split()
type Files = Mapping[str, object]


@dataclass(frozen=True)
class End:
    """How a command ended."""

    status: int
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line of the output; empty without any."""
        return next(reversed(self.output.splitlines()), "")


def make_files(folder: Path, data: Path, port: int) -> Files:
    """Writes the files that mistakes name.

    Args:
        data: prefix of a data set of tokens.
        port: on which somebody listens.
    """
    names = (
        *("profile", "half_profile", "negative_profile", "plan", "foreign_plan", "half_plan", "missing"),
        *("cut", "cut_tokens", "picture", "folder", "bad_lines", "script", "launch"),
    )
    files = {name: folder / name for name in names}
    odd = folder / "a space, ü"
    odd.mkdir()
    profile = synthetic_profile(Machine("dmmm", chunk_counts=(1, 2)))
    text = profile.to_json()
    files["profile"].write_text(text)
    files["half_profile"].write_text(text[:-100])
    files["negative_profile"].write_text(json.dumps(_negative(json.loads(text))))
    write_plan_file(files["plan"], PlanFile(fixed_plan(2), None))
    write_plan_file(files["foreign_plan"], PlanFile(fixed_plan(2), made_for(profile.model)))
    files["half_plan"].write_text(files["plan"].read_text()[:-20])
    for name, suffix_cut in (("cut", ".idx"), ("cut_tokens", ".bin"), (None, "")):
        for suffix in (".idx", ".bin"):
            content = Path(f"{data}{suffix}").read_bytes()
            copy = Path(f"{files[name] if name else odd / 'tokens'}{suffix}")
            copy.write_bytes(content[:-100] if suffix == suffix_cut else content)
    files["picture"].write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    files["folder"].mkdir()
    files["bad_lines"].write_text('{"text": "1 2"}\nno JSON\n')
    files["script"].write_text('torchrun --nproc-per-node 2 pretrain_gpt_moe.py "$@"\n')
    files["launch"].write_text("torchrun --nproc-per-node 2 pretrain_gpt_moe.py --num-layers 2\n")
    return {**files, "data": data, "port": port, "odd_data": odd / "tokens", "odd_report": odd / "report"}


def _negative(value: object) -> object:
    if isinstance(value, dict):
        return {name: _negative(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_negative(one) for one in value]
    return -value if isinstance(value, float) else value


def play(mistake: Mistake, files: Files, log: Path, is_training: bool) -> End:
    """Makes one mistake.

    Args:
        log: folder for its output, which is not there.
    """
    words: list[object] = []
    for word in shlex.split(mistake.words):
        words += _TINY if word == "{tiny}" else [word.format(**files)]
    env = {name: text.format(**files) for name, text in mistake.env.items()}
    script, arguments = _COMMAND, words
    if is_training:
        script, arguments = _TRAINING, command_line(files["data"], [*EP2, "--train-iters", 2, *words])
    env = {**dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(mistake.num_ranks)), **env}
    start_s = time.monotonic()
    # Not launch.run, which tries again where a port is in use.
    [result] = launch.finish(launch.start(script, arguments, 1, log, env), log, WITHIN_S)
    return End(result.returncode, result.output, time.monotonic() - start_s)


def play_all(mistakes: Mapping[str, Mistake], files: Files, logs: Path, is_training: bool) -> dict[str, End]:
    """Makes several mistakes, a few at a time."""
    launch.preloaded()  # not in the time of the first ones

    def one(numbered: tuple[int, Mistake]) -> End:
        return play(numbered[1], files, logs / str(numbered[0]), is_training)

    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        return dict(zip(mistakes, pool.map(one, enumerate(mistakes.values())), strict=True))


def flaws(mistake: Mistake, end: End, files: Files) -> list[str]:
    """What is wrong about an end: another status, several lines, our insides, or Megatron's list of arguments."""
    message = mistake.message.format(**files)
    lines = end.output.splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    return list(_flaws(mistake, end, message, lines, errors))


def _flaws(mistake: Mistake, end: End, message: str, lines: list[str], errors: list[str]) -> Iterable[str]:
    if end.status != mistake.status:
        yield f"status {end.status}, expected {mistake.status}"
    if mistake.status == 0:
        found = [line for line in lines if message in line]
        if len(found) != 1:
            yield f"{len(found)} lines say {message!r}"
    elif len(errors) != 1 or message not in errors[0] or lines[-1] != errors[0]:
        yield f"expected one line at the end with {message!r}, found {errors}"
    for text in ("Traceback", "No CUDA runtime is found", " ...........") if mistake.status else ("Traceback",):
        if text in end.output:
            yield f"{text!r} is shown"

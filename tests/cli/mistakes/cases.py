"""Mistakes of a first day: the command line, and the line that must answer it.

``{name}`` stands for a file of :func:`tests.cli.mistakes.play.make_files`, in words and in messages; the word
``{tiny}`` stands for the flags of a tiny model on two ranks.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """A command that is refused, or that warns.

    Attributes:
        words: arguments of ``lancet``; for a training, flags that follow the flags of a tiny model.
        message: a part of the line.
        env: further environment variables.
        num_ranks: of a training, as the launcher says. One process is started: a mistake is found before ranks meet.
        status: of the process; the line of one that ends well stands anywhere in its output.
    """

    words: str
    message: str
    env: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 2
    status: int = 2


TRAININGS = {
    "plan that is no file": Mistake("--lancet-plan fast", "expects auto, off or a plan file; there is no file fast"),
    "misspelt flag": Mistake("--lancet-num-chunk 2", "--lancet-num-chunk: did you mean --lancet-num-chunks?"),
    "negative chunks": Mistake("--lancet-num-chunks -1", "--lancet-num-chunks expects at least 1, got -1"),
    "half a chunk": Mistake("--lancet-num-chunks 2.5", "argument --lancet-num-chunks: invalid int value: '2.5'"),
    "chunks over the batch": Mistake(
        "--lancet-num-chunks 64 --lancet-chunk-dim batch", "--lancet-num-chunks 64 is more than the micro-batch can be"
    ),
    "chunks without all-to-alls": Mistake(
        "--expert-model-parallel-size 1 --disable-bias-linear --lancet-num-chunks 2",
        "--lancet-num-chunks 2 overlaps the all-to-all of expert parallelism, but there is none",
    ),
    "experts over ranks": Mistake("--num-experts 7", "must be a multiple of --expert-model-parallel-size; got 7"),
    "ranks over groups": Mistake("", "there are 3 ranks. Start a multiple of 2 ranks.", num_ranks=3),
    "ranks over stages": Mistake(
        "--pipeline-model-parallel-size 2", "there are 6 ranks. Start a multiple of 4 ranks.", num_ranks=6
    ),
    "plan of another model": Mistake("--lancet-plan {foreign_plan}", "was made for another model or layout"),
    "profile as plan": Mistake("--lancet-plan {profile}", "this is a profile; lancet plan make makes a plan of it"),
    "truncated plan": Mistake("--lancet-plan {half_plan}", "no JSON, or damaged"),
    "plan and chunks": Mistake("--lancet-plan {plan} --lancet-num-chunks 2", "--lancet-num-chunks 2 contradicts"),
    "no data": Mistake("--data-path", "no data: pass --data-path PREFIX"),
    "missing data": Mistake("--data-path /no/such_document", "data file not found: /no/such_document.idx"),
    "data with suffix": Mistake("--data-path {data}.bin", "Give the prefix without .bin/.idx"),
    "truncated index": Mistake("--data-path {cut}", "{cut}.idx is damaged"),
    "truncated tokens": Mistake("--data-path {cut_tokens}", "which may be cut. Rebuild it with lancet data encode."),
    "empty part of the data": Mistake("--split 99999,1,0", "gives the valid part of {data} none of its"),
    "tokenizer that is missing": Mistake(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {missing}",
        "--tokenizer-model: no such file: {missing}",
    ),
    "tokenizer of another kind": Mistake(
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {profile}",
        "--tokenizer-model {profile}: expected a SentencePiece model, as --tokenizer-type SentencePieceTokenizer says, "
        "found JSON",
    ),
    "report into a file": Mistake("--lancet-report {profile}", "{profile}: expected a folder, found a file"),
    "report below a file": Mistake("--lancet-report {profile}/report", "can't write there: Not a directory"),
    "report into no folder": Mistake("--lancet-report=", '--lancet-report expects a folder, got ""'),
    "flags in the environment": Mistake(
        "",
        "pass --lancet-num-chunks 2 on the command line, and unset LANCET_FLAGS",
        {"LANCET_FLAGS": "--lancet-num-chunks 2"},
    ),
    "two precisions": Mistake("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
    "hidden size over heads": Mistake("--hidden-size 63", "--hidden-size 63 is no multiple of --num-attention-heads 4"),
    "saves without interval": Mistake("--save {missing}", "--save needs --save-interval"),
    "smallest learning rate": Mistake("--min-lr 1", "--min-lr 1 is above --lr 0.001"),
    "batch over ranks": Mistake("--global-batch-size 15", "eval_global_batch_size (15) must be divisible by"),
    "CUDA graphs without a GPU": Mistake("--cuda-graph-impl local", "CUDA graphs need a GPU"),
    "two hops on one node": Mistake("--lancet-dispatch two-hop", "--lancet-dispatch two-hop is not possible"),
    "pairs of one micro-batch": Mistake(
        "--lancet-pairing on --lancet-num-chunks 1 --global-batch-size 8", "a step has one micro-batch"
    ),
    "no memory for dWs": Mistake("--lancet-dw-memory-mb=-5", "--lancet-dw-memory-mb expects a number of MB above 0"),
    "checkpoint that must be there": Mistake("--load {missing} --exit-on-missing-checkpoint", "no checkpoint in"),
    "port in use": Mistake(
        "--expert-model-parallel-size 1 --disable-bias-linear",
        "another program uses the port on which the ranks are to meet (EADDRINUSE)",
        {"MASTER_PORT": "{port}"},
        num_ranks=1,
    ),
    "layers of Transformer Engine, odd paths": Mistake(
        "--expert-model-parallel-size 1 --disable-bias-linear --train-iters 1 --transformer-impl transformer_engine "
        "--data-path {odd_data} --lancet-report {odd_report}",
        "Megatron-Lancet: no GPU found: CPU with gloo, local layers",
        {"HOME": "/proc"},
        num_ranks=1,
        status=0,
    ),
}

_STEPS = "--lr 1e-3 --train-iters 2"


def _required(names: str, command: str) -> str:
    return f"the following arguments are required: {names}. lancet {command} --help explains the arguments."


WITHOUT_ARGUMENTS = {
    "dry-run": "expected a launch script, or flags of Megatron, found nothing",
    "check": "expected a launch script, or flags of Megatron, found nothing",
    "estimate": "--cluster is missing: pass NODESxGPUS:GPU,INTRA,INTER, for example 32x8:h100,nvlink,400g",
    "gpu-check": "expected a folder for the results",
    "plan profile": _required("--output", "plan profile"),
    "plan make": _required("PROFILE, --output", "plan make"),
    "plan explain": _required("PLAN", "plan explain"),
    "plan simulate": _required("PROFILE", "plan simulate"),
    "plan step": "expected a launch script, or flags of Megatron, found nothing",
    "plan experts": _required("FILE", "plan experts"),
    "plan routing": "--load is missing: pass a checkpoint and a text",
    "trace show": _required("TRACE.json", "trace show"),
    "trace profile": _required("TRACE, --output", "trace profile"),
    "data corpus": _required("--output", "data corpus"),
    "data tokenizer": _required("--input, --output-prefix, --vocab-size", "data tokenizer"),
    "data encode": _required("--input, --output-prefix, --tokenizer-type", "data encode"),
    "evaluate": _required("--load, --data", "evaluate"),
    "export-hf": _required("--load, --from-hf, --output", "export-hf"),
    "generate": _required("--load", "generate"),
}
"""The line of each command that gets nothing."""

_LAUNCHES = {
    "dry-run {missing}": "there is no launch script {missing}",
    "dry-run {folder}": "there is no launch script {folder}",
    "dry-run {picture}": "{picture} is no text: expected a launch script, or a file of flags",
    "dry-run {script}": "no data: pass --data-path PREFIX (see lancet data encode) or --mock-data",
    "dry-run {tiny} --train-iters 2": "--lr is missing: pass it.",
    "dry-run {tiny} --lr 1e-3": "--train-iters is missing: pass it, or --train-samples.",
    f"dry-run {{tiny}} {_STEPS} --lancet-world-size 3": "there are 3 ranks. Start a multiple of 2 ranks.",
    f"dry-run {{tiny}} {_STEPS} --lancet-world-size 2 --lancet-num-chunks 16": (
        "; a chunk has 4 tokens, and with fewer than 16 launching an op costs more than its work: cut into fewer chunks"
    ),
    "check {script}": "a check needs the model's sizes: pass --num-layers, --hidden-size, --num-attention-heads",
    "check {picture}": "{picture} is no text",
    f"estimate {{tiny}} {_STEPS} --cluster 3x8:h1000,nvlink,400g": "the GPU h1000 is not known. Pass one of a100, h100",
    "plan step --num-layers 2": "is missing: pass it.",
    "plan step {script} --num-layers 2": "is missing: pass it.",
    "plan step {tiny} --lancet-plan off": "there is no plan to model: off",
}
_FILES = {
    "plan make {launch} --output {missing}": "no usable profile: {launch}: no JSON, or damaged: Expecting value",
    "plan make {picture} --output {missing}": "no usable profile: {picture}: no JSON, or damaged",
    "plan make {folder} --output {missing}": (
        "{folder}: can't be read: Is a directory. lancet plan profile and lancet trace profile make one"
    ),
    "plan make {half_profile} --output {missing}": "no usable profile: {half_profile}: no JSON, or damaged",
    "plan make {negative_profile} --output {missing}": "negative_profile.ops[0].ms: expected 0 to ",
    "plan make {profile} --output {missing}/plan": "output folder {missing} does not exist (for plan); create it first",
    "plan make {profile} --output {missing} --ep-size 3": "EP size 3 does not divide the 4 experts of the profiled",
    "plan make {profile} --output {missing} --inter-gbps 400": "--inter-gbps is about links between nodes",
    "plan simulate {profile} --inter-latency-us 3": "pass --ranks-per-node too, or drop it",
    "plan simulate {profile} --world-sizes 8 --ranks-per-node 3": "--ranks-per-node 3 does not divide the 8 ranks",
    "plan simulate {plan}": "no usable profile: {plan}: this is a plan, expected a profile",
    "plan simulate {profile} {profile}": "no usable plan: {profile}: this is a profile; lancet plan make makes a plan",
    "plan explain {profile}": "no usable plan: {profile}: this is a profile",
    "plan explain {picture}": "no usable plan: {picture}: no JSON, or damaged",
    "plan experts {missing}": "no usable load of experts: {missing}: can't be read",
    "plan experts {plan}": "no usable load of experts: {plan}: unknown field 'plan'",
    "trace show {profile}": "this is not the trace of a run: {profile}: expected a trace with traceEvents",
    "trace show {picture}": "this is not the trace of a run: {picture}: no JSON, or damaged",
    "trace show {folder}": "this is not the trace of a run: {folder}: can't be read: Is a directory",
    "trace profile {picture} --output {missing}": "{picture}: no trace, or damaged",
    "trace profile {profile} --output {missing}": "{profile}",
    "data corpus --output {missing}/x": "output folder {missing} does not exist (for x); create it first",
    "data tokenizer --input {missing} --output-prefix {folder}/o --vocab-size 500": "cannot read input file {missing}",
    "data tokenizer --input {bad_lines} --output-prefix {folder}/o --vocab-size 500": "{bad_lines}, line 2: expected",
    "data encode --input {bad_lines} --output-prefix {folder}/o --tokenizer-type NullTokenizer --vocab-size 500": (
        "{bad_lines}, line 2: expected one JSON object"
    ),
    "data encode --input {bad_lines} --output-prefix {folder}/o --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model {missing}": "needs --tokenizer-model, a folder with tokenizer.json or a name on the hub",
    "evaluate --load {folder} --data {data}": "--load: no checkpoint in {folder}: latest_checkpointed_iteration.txt is",
    "evaluate --load {picture} --data {data}": "--load: there is no folder {picture}",
    "generate --load {folder} --prompt 1 --top-p 3": "--top-p expects a number above 0 and at most 1, got 3.",
    "generate --load {folder} --prompt 1": "--load: no checkpoint in {folder}",
    "plan routing --load {folder} --data {data}": "--load: no checkpoint in {folder}",
}
_WARNS = (f"dry-run {{tiny}} {_STEPS} --lancet-world-size 2 --lancet-num-chunks 16",)
COMMANDS = {
    words: Mistake(words, message, status=0 if words in _WARNS else 2)
    for words, message in {
        **WITHOUT_ARGUMENTS,
        "plan mak": "there is no command 'plan mak'",
        "nonsense": "there is no command 'nonsense'; expected dry-run, check,",
        **_LAUNCHES,
        **_FILES,
    }.items()
}

"""The sub-commands of ``lancet``: names, tools that they run, and what each is for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        words: its name, of one word or two.
        tool: the path of the file in ``tools`` that it runs, without suffix.
        takes: its main arguments.
        summary: what it does, in a few words.
    """

    words: str
    tool: str
    takes: str
    summary: str


GROUPS = {
    "before a training (LAUNCH: a launch script with its arguments, a file of flags, or flags)": (
        Command("dry-run", "dry_run", "LAUNCH", "would it start: layout, memory, plan; without GPUs"),
        Command("check", "check", "LAUNCH", "are its gradients right: a shrunk copy on CPU ranks"),
        Command("estimate", "estimate", "LAUNCH --cluster C", "what overlap would bring on a cluster"),
        Command("gpu-check", "check_gpu", "FOLDER", "what to run first on a machine with GPUs"),
    ),
    "plans": (
        Command("plan profile", "plans/profile_model", "LAUNCH", "measures the ops and messages of a model"),
        Command("plan make", "plans/make_plan", "PROFILE", "makes a plan from a profile"),
        Command("plan explain", "plans/explain_plan", "PLAN", "why the plan is fast, what stays exposed"),
        Command(
            "plan simulate", "plans/simulate_plan", "PROFILE [PLAN]", "its step time on other clusters and layouts"
        ),
        Command("plan step", "plans/virtual_gpu", "LAUNCH", "the step of a GPU that is not there, by kernels"),
        Command("plan experts", "plans/place_experts", "LOAD", "places experts on ranks by their load"),
        Command("plan routing", "plans/routing_report", "--load DIR", "which experts a checkpoint's routers choose"),
    ),
    "traces": (
        Command("trace show", "traces/show_timeline", "TRACE", "the timeline of a step as a page"),
        Command("trace profile", "traces/profile_from_trace", "TRACES", "a profile from torch's traces of a stock run"),
    ),
    "data and checkpoints": (
        Command("data corpus", "data/prepare_corpus", "", "collects texts from files"),
        Command("data tokenizer", "data/train_tokenizer", "", "trains a SentencePiece tokenizer"),
        Command("data encode", "data/preprocess_data", "", "encodes a corpus into a data set of tokens"),
        Command("evaluate", "evaluate", "--load DIR", "perplexity of a checkpoint"),
        Command("export-hf", "export_hf", "--load DIR", "a checkpoint as a Hugging Face folder"),
        Command("generate", "generate", "--load DIR", "text from a checkpoint"),
    ),
}
"""The commands under each heading of the help."""

COMMANDS = {command.words: command for group in GROUPS.values() for command in group}


def help_text(first_word: str = "") -> str:
    """Returns the help of ``lancet``, or of the sub-commands that begin with ``first_word``."""
    lines = [f"usage: lancet {first_word or 'COMMAND'} ..."]
    for heading, group in GROUPS.items():
        chosen = [one for one in group if not first_word or one.words.split()[0] == first_word]
        if chosen:
            lines += ["", heading, *(f"  {f'{one.words} {one.takes}':<30}{one.summary}" for one in chosen)]
    if not first_word:
        lines += [
            "",
            "A training: torchrun ... pretrain_gpt_moe.py ... (--lancet-help lists its flags of Megatron-Lancet).",
        ]
    return "\n".join([*lines, "", "lancet COMMAND --help explains a command."])

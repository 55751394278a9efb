"""Flags of ``pretrain_gpt_moe.py`` that other launchers can't have, or only with a plan."""

from megatron_lancet.config import AttentionChoice, LancetConfig
from megatron_lancet.errors import UsageError
from megatron_lancet.feature import Feature, RunFacts

_REFUSED = {
    "--lancet-expert-placement": ": other launchers load and export experts in Megatron's order. Drop it.",
    "--lancet-pack-documents": ": other launchers have samples of their own. Drop it.",
}
"""Flags that Megatron's own script may have, and why other launchers can't, as the end of a sentence."""


def check_flags(config: LancetConfig) -> None:
    """
    Raises:
        UsageError: a flag needs Megatron's own training loop.
    """
    for flag, entry, its, value in config.entries():
        why = its.not_with_spec or _REFUSED.get(flag)
        if why and value != entry.default:
            raise UsageError(f"{flag} needs pretrain_gpt_moe.py{why}")


class OnlyWithPlan(Feature):
    """Settings that have no effect without a plan: the model is built, and nothing is timed."""

    name = "only_with_plan"

    def check(self, facts: RunFacts) -> None:
        """
        Raises:
            UsageError: another attention kernel is asked for, which would change the model's numbers.
        """
        if facts.config.attention is AttentionChoice.SDPA and facts.plan is None:
            raise UsageError(
                "--lancet-attention sdpa needs a plan, and this model gets none: --lancet-plan is off, or the overlap "
                "has nothing to do in it or does not support it. Drop the flag; a line then says which."
            )

    def note(self, facts: RunFacts) -> str:
        """Says that a report is not written."""
        is_asked = facts.config.report_dir is not None and facts.plan is None
        return f"; --lancet-report {facts.config.report_dir} is not written without a plan" if is_asked else ""

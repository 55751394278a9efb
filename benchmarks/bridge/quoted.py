"""The sentence of RESULTS.md about training in Megatron-Bridge's loop."""

from benchmarks.bridge.summary import about, summarise
from benchmarks.quoted.cells import NO_RESULT
from benchmarks.quoted.results import newest


def bridge() -> str:
    """The newest result."""
    for quoted in newest("bridge").values():
        return f"In Megatron-Bridge ([samples](results/{quoted.file}){quoted.mark}), {about(summarise(quoted.case))}"
    return NO_RESULT


TABLES = {"bridge": bridge}

"""Reads a plan's text."""

from megatron_lancet.files.reader import parse_record
from megatron_lancet.schedule.plan import PLAN_VERSION, Plan


def read_plan(text: str, where: str = "plan") -> Plan:
    """The plan whose ``to_json`` gave a text."""
    return parse_record(Plan, text, PLAN_VERSION, "the plan", where)

"""One page of Markdown from the results of the check. Neither torch nor Megatron."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.check.compare import IDEAL, table
from benchmarks.gpu.table import Found, Row, found_in, summarise
from benchmarks.harness.tables import markdown
from megatron_lancet.testkit.mock.link import Link

_STOCK = "stock"
_FREE = str(Link())
Record = Mapping[str, Any]
Section = Callable[[Sequence[Record], Mapping[str, Any]], str]
"""Makes Markdown of a part's results and the whole of ``gpu-check.json``; empty where there is nothing to show."""


@dataclass(frozen=True)
class Ended:
    """How a part ended.

    Attributes:
        status: exit status; None where it was stopped, or has not begun.
        why: why it was stopped or has not begun; empty where it ended by itself.
        records: its results.
    """

    name: str
    title: str
    status: int | None
    seconds: float
    why: str
    records: Sequence[Record]

    @property
    def errors(self) -> list[Record]:
        """The results that are errors."""
        return [record for record in self.records if "error" in record]

    @property
    def is_good(self) -> bool:
        """Whether the part ended by itself, without an error."""
        return self.status == 0 and not self.errors

    @property
    def told(self) -> str:
        """The end in one line."""
        if self.is_good:
            return f"good: {len(self.records)} results in {self.seconds:g} s"
        why = self.why or f"exit status {self.status}"
        return f"{why} after {self.seconds:g} s: {len(self.records)} results, {len(self.errors)} of them errors"


def written(result: Mapping[str, Any]) -> str:
    """The page.

    Args:
        result: what ``gpu-check.json`` holds.
    """
    parts = _parts(result)
    lines = [f"# The check on a GPU: {_device(parts)}", ""]
    if result["is_rehearsal"]:
        lines += ["**A rehearsal on the virtual GPU: a kernel takes a microsecond, and no figure means anything.**", ""]
    lines += [*_head(result, parts), "", *_ends(parts.values()), *_sections(parts, result, _SECTIONS, "## ")]
    return "\n".join([*lines, *_errors(parts.values())]) + "\n"


def shown(result: Mapping[str, Any], samples: str = "") -> str:
    """The same for a document: the machine, and the results of some parts.

    Args:
        samples: Markdown behind the title of each part.
    """
    parts = _parts(result)
    lines = [
        f"{_device(parts)}; {'; '.join(filter(None, _head(result, parts)))}",
        *_sections(parts, result, _IN_DOCUMENTS, "**", f"**{samples}"),
    ]
    return "\n".join([*lines, *_errors(parts.values())])


def _parts(result: Mapping[str, Any]) -> dict[str, Ended]:
    return {part["name"]: Ended(**part) for part in result["parts"]}


def _sections(
    parts: Mapping[str, Ended], result: Mapping[str, Any], sections: Mapping[str, Section], before: str, after: str = ""
) -> Iterator[str]:
    for name, section in sections.items():
        records = parts[name].records if name in parts else ()
        found = section(records, result) if records else ""
        if found:
            title = parts[name].title
            yield from ("", f"{before}{title[0].upper()}{title[1:]}{after}", "", found)


def _device(parts: Mapping[str, Ended]) -> str:
    devices = _record(parts, "machine", "devices").get("devices", [])
    names = [one if isinstance(one, str) else one["name"] for one in devices]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "unknown device"


def _record(parts: Mapping[str, Ended], part: str, name: str) -> Record:
    records = parts[part].records if part in parts else ()
    return next((record for record in records if record["name"] == name), {})


def _head(result: Mapping[str, Any], parts: Mapping[str, Ended]) -> Iterator[str]:
    versions = {name: value for name, value in _record(parts, "machine", "versions").items() if name != "name"}
    commit = (result["commit"] or "unknown")[:12] + (" with uncommitted changes" if result["is_dirty"] else "")
    yield f"{result['date']}, commit {commit}; " + ", ".join(f"{name} {value}" for name, value in versions.items())
    yield ""
    prediction = result["prediction"]
    yield f"Predicted before: `prediction-{prediction['device'].lower()}.json`, SHA-256 `{prediction['sha256']}`"


def _ends(parts: Any) -> list[str]:
    rows = [["part", "what it shows", "how it ended"]]
    rows += [[f"`{part.name}`", part.title, part.told] for part in parts]
    return [markdown(rows)]


def _errors(parts: Any) -> Iterator[str]:
    found = [(part.name, record) for part in parts for record in part.errors]
    if found:
        yield from ("", "Errors:", "")
    for part, record in found:
        where = " ".join(str(record[key]) for key in ("name", "variant", "case", "plan") if key in record)
        yield f"- `{part}` {where}: {str(record['error']).splitlines()[0]}"


def timed_rows(found: Found) -> dict[str, dict[str, Row]]:
    """Rows by link and variant; stock on the free link is not among them, nor are links without times of stock."""
    timed = {link: samples for link, samples in found.samples.items() if link != _FREE and _STOCK in samples}
    return {link: summarise(samples, _STOCK) for link, samples in timed.items()}


def measured(records: Sequence[Record], links: Sequence[str]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Step and exposed time by variant and link, as :mod:`compare` takes them.

    Args:
        records: of the part ``timing``.
        links: of the prediction, as LATENCY_US:GBYTES_PER_S.
    """
    found = found_in(records)
    named = {str(Link.parse(link)): link for link in links}
    result: dict[str, dict[str, dict[str, float | None]]] = {}
    ideal = found.samples.get(_FREE, {}).get(_STOCK)
    for link, rows in timed_rows(found).items():
        if link not in named:
            continue
        for name, row in rows.items():
            figures = {"step_ms": row.step_ms, "exposed_ms": row.exposed_ms}
            result.setdefault(name, {})[named[link]] = figures
        if ideal is not None:
            step_ms = statistics.median(ideal.step_ms.values())
            result.setdefault(IDEAL, {})[named[link]] = {"step_ms": step_ms, "exposed_ms": None}
    return result


def _steps(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """Speed-ups by link."""
    found = found_in(records)
    lines = [["link", "variant", "step ms", "speed-up (quartiles)", "exposed ms", "idle ms", "peak MB", "rounds"]]
    for link, rows in timed_rows(found).items():
        for name, row in rows.items():
            rounds = str(len(found.samples[link][name].step_ms))
            speed = f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})"
            cells = [_number(one, 1) for one in (row.exposed_ms, row.idle_ms)]
            lines.append([link, name, f"{row.step_ms:.1f}", speed, *cells, _number(row.peak_mb, 0), rounds])
    blocks = [markdown(lines)]
    blocks += [f"{name} was left out: {reason.splitlines()[0]}" for name, reason in found.skipped.items()]
    return "\n\n".join(blocks)


def _timing(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """Speed-ups by link, then predicted next to measured."""
    blocks = [_steps(records, result)]
    prediction = result["prediction"]
    links = list(dict.fromkeys(link for by_link in prediction["variants"].values() for link in by_link))
    if not result["is_rehearsal"]:
        blocks.append(table(prediction, measured(records, links)))
    return "\n\n".join(blocks)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _smoke(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """How many paths ran, and where the host waits otherwise than once for each layer and chunk."""
    ran = [record for record in records if "waits" in record and "error" not in record]
    other = [record for record in ran if record["waits_per_layer_and_chunk"] != 1]
    lines = [f"{len(ran)} paths ran. The host waits once for each layer and chunk in {len(ran) - len(other)} of them."]
    if other:
        rows = [["path", "waits per layer and chunk", "waits", "expected"]]
        keys = ("waits_per_layer_and_chunk", "waits", "waits_expected")
        rows += [[record["name"], *(_cell(record.get(key)) for key in keys)] for record in other]
        lines.append(markdown(rows))
    return "\n\n".join(lines)


def _gradients(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """The worst plan of each model and precision."""
    by_model: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if "gradient_error" in record:
            by_model[", ".join(record["name"].split(", ")[:2])].append(record)
    rows = [["model", "plans", "largest error of a gradient", "bound", "parameter", "equal in all repeats"]]
    for model, found in by_model.items():
        worst = max(found, key=lambda record: record["error_of_bound"])
        equal = sum(record["repeats_equal"] for record in found)
        figures = [f"{worst[key]:.1e}" for key in ("gradient_error", "bound")]
        rows.append([model, str(len(found)), *figures, f"`{worst['parameter']}`", f"{equal} of {len(found)}"])
    return markdown(rows)


def _ranks(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """What the ranks are, their worst gradient, and on several devices their steps and messages."""
    lines = [str(record["shows"]) for record in records if "shows" in record]
    errors = [record["error_vs_stock"] for record in records if "error_vs_stock" in record]
    if errors:
        lines.append(f"{len(errors)} cases; the largest error of a gradient against stock is {max(errors):.1e}.")
    steps = [["variant", "step ms", "speed-up", "rounds"]]
    for record in records:
        if record["name"] == "steps":
            figures = [f"{record['median_ms']:.1f}", _number(record["speedup"], 2)]
            steps.append([record["variant"], *figures, str(record["rounds"])])
    sizes = [["message MB", "at most SMs", "ms", "GB/s"]]
    for record in records:
        if record["name"] == "all-to-all":
            keys = ("mb", "max_ctas", "wire_ms", "gbytes_per_s")
            sizes.append([_cell(record.get(key)) for key in keys])
    lines += [markdown(rows) for rows in (steps, sizes) if len(rows) > 1]
    return "\n\n".join(lines)


def _host_time(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """Of each variant, by groups of ops."""
    found = [record for record in records if "groups_us" in record]
    if not found:
        return ""
    groups = list(dict.fromkeys(group for record in found for group in record["groups_us"]))
    rows = [["us per layer and micro-batch", *(str(record["name"]) for record in found)]]
    rows += [[group, *(_cell(record["groups_us"].get(group)) for record in found)] for group in groups]
    for key, text in (("us_per_layer", "all"), ("kernels_per_layer", "kernels")):
        rows.append([text, *(_cell(record.get(key)) for record in found)])
    return markdown(rows)


def _link(records: Sequence[Record], result: Mapping[str, Any]) -> str:
    """The largest deviation from the formula by rate and SMs; what the kernel could copy at most."""
    by_link: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if "blocks" in record and " at " in record["name"]:
            by_link[record["name"].partition(" at ")[2]].append(record)
    rows = [["link", "messages", "largest deviation next to a launch", "of expected us"]]
    for link, found in by_link.items():
        off_us, worst = max(((_off_us(record), record) for record in found), key=lambda one: one[0])
        rows.append([link, str(len(found)), f"{off_us:.1f} us", f"{worst['expected_us']:.1f}"])
    lines = [markdown(rows)] if len(rows) > 1 else []
    rates = [f"{record['name']}: {record['gbytes_per_s']:.0f} GB/s" for record in records if "gbytes_per_s" in record]
    return "\n\n".join([*lines, *(["; ".join(rates)] if rates else [])])


def _off_us(record: Record) -> float:
    return abs(float(record["measured_us"] - record.get("launch_us", 0.0) - record["expected_us"]))


def _plain(*columns: str) -> Section:
    """A table of these values of all records that have the first of them."""

    def section(records: Sequence[Record], result: Mapping[str, Any]) -> str:
        rows = [["", *(column.replace("_", " ") for column in columns)]]
        for record in records:
            if columns[0] in record and "error" not in record:
                rows.append([str(record["name"]), *(_cell(record.get(column)) for column in columns)])
        return markdown(rows) if len(rows) > 1 else ""

    return section


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


_SECTIONS: dict[str, Section] = {
    "timing": _timing,
    "graphs": _steps,
    "smoke": _smoke,
    "gradients": _gradients,
    "ranks": _ranks,
    "link": _link,
    "beside": _plain("alone_ms", "beside_ms", "slowdown", "message_alone_us", "message_beside_us", "late_us"),
    "host_time": _host_time,
    "memcheck": _plain("errors", "steps", "why"),
}
"""How the results of each part are shown, in the order of the page."""
_IN_DOCUMENTS: dict[str, Section] = {
    "timing": _steps,
    "graphs": _steps,
    "gradients": _gradients,
    "host_time": _host_time,
}

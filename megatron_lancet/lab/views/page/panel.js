"use strict";
// Everything that is text: figures, legend, labels, tooltip, summary. Text from the data is set as text, never as HTML.

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function showFigures(place) {
  const parts = [];
  for (const source of ["measured", "predicted"]) {
    const groups = GROUPS.filter((group) => group.source === source);
    if (!groups.length) continue;
    const step = Math.max(...groups.map((group) => group.stepMs));
    const exposed = mean(groups.map((group) => group.exposedMs));
    const share = ((100 * exposed) / step).toFixed(1);
    parts.push(`${source}: step ${msText(step)}, ${msText(exposed)} of it exposed (${share} %)`);
  }
  place.textContent = parts.join(" \u00b7 ");
}

function showLegend(place) {
  const used = new Set();
  for (const group of GROUPS) {
    for (const row of group.rows) {
      for (const track of row.tracks) for (const name of track.name) used.add(track.categories[name]);
    }
  }
  CATEGORIES.forEach((entry, index) => {
    if (!used.has(index)) return;
    const swatch = element("span", "", `swatch ${entry.key}`);
    if (entry.key !== "wait") swatch.style.background = `var(--${entry.key})`;
    const item = element("li");
    item.append(swatch, entry.label);
    place.append(item);
  });
}

function groupLabel(group) {
  const label = element("div", undefined, "label");
  label.append(element("strong", `rank ${group.rank} ${group.source}`));
  const share = ((100 * group.exposedMs) / group.stepMs).toFixed(1);
  label.append(`step ${msText(group.stepMs)}`, element("br"), `exposed ${msText(group.exposedMs)} (${share} %)`);
  return label;
}

function fillTip(tip, chosen) {
  const { group, track, index } = chosen;
  const name = DATA.names[track.name[index]];
  const list = element("dl");
  const row = (label, value) => list.append(element("dt", label), element("dd", value));
  row("where", `rank ${group.rank} ${group.source}, ${track.lane === "comm" ? track.title : "compute"}`);
  if (name.layer !== null) row("layer", name.layer);
  if (name.chunk !== null) row("chunk", name.chunk);
  if (name.tile !== null) row("tile", name.tile);
  if (name.phase !== null) row("phase", PHASE_WORDS[name.phase]);
  row("start", msText(track.start[index]));
  row("duration", msText(track.ms[index]));
  if (track.lane === "comm") row("sent", bytesText(track.bytes[index]));
  const parts = [element("strong", name.text), element("em", name.words)];
  if (track.lane === "wait") parts.push(element("div", "compute waits for this message", "loud"));
  if (track.lane === "wait" && name.reason) row("why, as planned", name.reason);
  tip.replaceChildren(...parts, list);
}

function placeTip(tip, x, y) {
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width < innerWidth ? x + 16 : x - 16 - box.width;
  const top = y + 16 + box.height < innerHeight ? y + 16 : y - 16 - box.height;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function figure(ms) {
  return ms === null ? "\u2013" : ms.toFixed(2);
}

// A line per layer and chunk, and a line for each layer of several chunks. `find` searches for a text.
function showSummary(table, find) {
  const { rows, all } = DATA.exposed;
  const shown = [0, 1, 2].filter((column) => all[column] !== null);
  const head = element("tr");
  const titles = ["before", "measured", "predicted"];
  for (const text of ["layer", "chunk", ...shown.map((column) => titles[column]), ""]) {
    const cell = element("th", text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = element("tbody");
  const largest = Math.max(...rows.map((row) => row[3]), 1e-9);
  const sum = (values) => (values.every((ms) => ms === null) ? null : values.reduce((total, ms) => total + (ms || 0), 0));
  for (const layer of new Set(rows.map((row) => row[0]))) {
    const own = rows.filter((row) => row[0] === layer);
    if (own.length > 1) {
      const sums = shown.map((column) => sum(own.map((row) => row[column + 2])));
      body.append(summaryLine(layer, null, sums, 0, find, "sum"));
    }
    for (const [, chunk, ...values] of own) {
      const cells = shown.map((column) => values[column]);
      body.append(summaryLine(layer, chunk, cells, values[1] / largest, find, ""));
    }
  }
  const total = element("tr", undefined, "sum");
  total.append(element("td", "all"), element("td"), ...shown.map((column) => element("td", figure(all[column]))), element("td"));
  body.append(total);
  const top = element("thead");
  top.append(head);
  table.replaceChildren(top, body);
}

function summaryLine(layer, chunk, values, share, find, className) {
  const line = element("tr", undefined, className);
  const first = element("td");
  if (layer === null) first.textContent = "other";
  else {
    const text = chunk === null ? `L${layer}.` : `L${layer}.c${chunk}.`;
    const button = element("button", `${layer}`);
    button.type = "button";
    button.title = `find ${text}`;
    button.addEventListener("click", () => find(text));
    first.append(button);
  }
  const bar = element("td", undefined, "share");
  const length = element("div");
  length.style.width = `${100 * share}%`;
  bar.append(length);
  line.append(first, element("td", className ? "all" : chunk === null ? "\u2013" : `${chunk}`));
  line.append(...values.map((ms) => element("td", figure(ms))), bar);
  return line;
}

"use strict";
// Draws rows of spans on canvases. Only what is in view is looked at.

const CROWDED = 2; // spans for each pixel, from which on shares are drawn and not spans
const CHARACTER_PX = 6.7;
const LABEL_PX = 40; // narrower spans have no text

let INK = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const fills = CATEGORIES.map((entry) => value(entry.key));
  INK = {
    fills: [...fills, value("dim")],
    texts: [...fills.map(contrast), value("quiet")],
    mark: value("mark"),
    line: value("line"),
    quiet: value("quiet"),
    forward: value("forward"),
    stripes: stripes(fills[CATEGORY_OF.wait], value("wait-stripe")),
  };
}

function contrast(colour) {
  const channel = (at) => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const light = 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
  return light > 0.18 ? "#000000" : "#ffffff";
}

function stripes(colour, stripe) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const context = tile.getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 8, 8);
  context.strokeStyle = stripe;
  context.lineWidth = 1.4;
  context.beginPath();
  for (const shift of [-8, 0, 8]) {
    context.moveTo(shift, 8);
    context.lineTo(shift + 8, 0);
  }
  context.stroke();
  return context.createPattern(tile, "repeat");
}

// Fits the canvas to its place and the screen's pixels; returns its context in CSS pixels, emptied.
function cleared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [real_width, real_height] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== real_width || canvas.height !== real_height) {
    canvas.width = real_width;
    canvas.height = real_height;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Draws a group; returns how many spans were looked at one by one.
function drawGroup(group, canvas, width, view, isFound, chosen) {
  const context = cleared(canvas, width, group.height);
  context.font = "11px ui-monospace, Menlo, Consolas, monospace";
  context.textBaseline = "middle";
  const scale = width / (view.to - view.from);
  let drawn = 0;
  for (const row of group.rows) {
    const parts = row.tracks.map((track) => [track, firstAfter(track, view.from), firstFrom(track, view.to)]);
    const spans = parts.reduce((sum, [, first, end]) => sum + Math.max(0, end - first), 0);
    if (spans > CROWDED * width) drawShares(context, row, parts, width, view, scale, isFound);
    else for (const part of parts) drawSpans(context, row, ...part, width, view, scale, isFound);
    drawn += spans;
  }
  drawEnd(context, group, width, view, scale);
  const step_end = (group.stepMs - view.from) * scale;
  if (step_end >= 0 && step_end <= width) {
    context.fillStyle = INK.quiet;
    context.fillRect(Math.min(step_end, width - 1), 0, 1, group.height - ROW_GAP);
  }
  if (chosen && chosen.group === group) outline(context, chosen, width, view, scale);
  return drawn;
}

// What follows the last op of a layer: no ops of the plan, so it has no spans.
function drawEnd(context, group, width, view, scale) {
  const left = Math.max(0, (group.opsEndMs - view.from) * scale);
  const right = Math.min(width, (group.stepMs - view.from) * scale);
  if (right - left < 1) return;
  const [row] = group.rows;
  context.fillStyle = INK.fills[DIM];
  context.fillRect(left, row.y, right - left, row.height);
  const room = right - left - 8;
  const text = ["gradient reduction, optimizer", "reduction, optimizer", "end of step"].find((one) => one.length * CHARACTER_PX <= room);
  if (!text) return;
  context.fillStyle = INK.quiet;
  context.fillText(text, left + 4, row.y + row.height / 2 + 0.5);
}

function drawSpans(context, row, track, first, end, width, view, scale, isFound) {
  for (let index = first; index < end; index++) {
    const left = Math.max(-2, (track.start[index] - view.from) * scale);
    const right = Math.min(width + 2, (track.start[index] + track.ms[index] - view.from) * scale);
    const extent = Math.max(0.6, right - left - (right - left > 4 ? 0.8 : 0));
    const name = track.name[index];
    const found = isFound(name);
    const colour = found ? track.categories[name] : DIM;
    context.fillStyle = colour === CATEGORY_OF.wait && extent > 3 ? INK.stripes : INK.fills[colour];
    context.fillRect(left, row.y, extent, row.height);
    if (extent > LABEL_PX) drawLabel(context, row, DATA.names[name].text, colour, Math.max(left, 0), left + extent);
  }
}

function drawLabel(context, row, text, colour, left, right) {
  const room = Math.floor((Math.min(right, 1e5) - left - 8) / CHARACTER_PX);
  if (room < 4) return;
  const fitting = text.length <= room ? text : text.replace(/^(L\d+\.)?(c\d+\.)?[FIW]\./, "");
  const shown = fitting.length <= room ? fitting : `${fitting.slice(0, room - 1)}\u2026`;
  if (colour === CATEGORY_OF.wait) {
    context.fillStyle = INK.fills[colour];
    context.fillRect(left + 2, row.y + row.height / 2 - 7, shown.length * CHARACTER_PX + 4, 14);
  }
  context.fillStyle = INK.texts[colour];
  context.fillText(shown, left + 4, row.y + row.height / 2 + 0.5);
}

// Where several spans share a pixel: the height of a colour is its share of the pixel's time.
function drawShares(context, row, parts, width, view, scale, isFound) {
  const num_colours = CATEGORIES.length + 1;
  const columns = Math.ceil(width);
  const shares = new Float32Array(columns * num_colours);
  for (const [track, first, end] of parts) {
    for (let index = first; index < end; index++) {
      const name = track.name[index];
      const colour = isFound(name) ? track.categories[name] : DIM;
      const left = Math.max(0, (track.start[index] - view.from) * scale);
      const right = Math.min(columns, (track.start[index] + track.ms[index] - view.from) * scale);
      for (let column = Math.floor(left); column < right; column++) {
        const covered = Math.min(right, column + 1) - Math.max(left, column);
        shares[column * num_colours + colour] += covered;
      }
    }
  }
  for (let colour = 0; colour < num_colours; colour++) {
    context.fillStyle = INK.fills[colour];
    for (let column = 0; column < columns; column++) {
      const share = shares[column * num_colours + colour];
      if (share <= 0) continue;
      let above = 0;
      for (let other = 0; other < colour; other++) above += shares[column * num_colours + other];
      if (above >= 1) continue;
      context.fillRect(column, row.y + above * row.height, 1, Math.min(share, 1 - above) * row.height);
    }
  }
}

function outline(context, chosen, width, view, scale) {
  const { row, track, index } = chosen;
  const left = Math.max(1, (track.start[index] - view.from) * scale);
  const right = Math.min(width - 1, (track.start[index] + track.ms[index] - view.from) * scale);
  if (right < 0 || left > width) return;
  context.strokeStyle = INK.mark;
  context.lineWidth = 2;
  context.strokeRect(left, row.y + 1, Math.max(2, right - left), row.height - 2);
}

// The span of a group at a point in time and height, or null; one up to a few pixels beside the point counts.
function spanAt(group, ms, y, slack_ms) {
  const row = group.rows.find((candidate) => y >= candidate.y && y < candidate.y + candidate.height + ROW_GAP);
  if (!row) return null;
  let best = null;
  for (const track of row.tracks) {
    const index = firstAfter(track, ms);
    for (const near of [index - 1, index]) {
      if (near < 0 || near >= track.length) continue;
      const away = Math.max(track.start[near] - ms, ms - track.start[near] - track.ms[near], 0);
      if (away <= slack_ms && (!best || away < best.away || (away === best.away && track.lane === "wait"))) {
        best = { group, row, track, index: near, away };
      }
    }
  }
  return best;
}

function drawAxis(canvas, width, height, view, mark) {
  const context = cleared(canvas, width, height);
  const scale = width / (view.to - view.from);
  const rough = 90 / scale;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  context.font = "11px system-ui, sans-serif";
  for (let tick = Math.ceil(view.from / step); tick * step <= view.to; tick++) {
    const x = (tick * step - view.from) * scale;
    context.fillStyle = INK.line;
    context.fillRect(x, height - 7, 1, 7);
    context.fillStyle = INK.quiet;
    const text = `${(tick * step).toFixed(digits)} ms`;
    const extent = context.measureText(text).width;
    context.fillText(text, Math.min(Math.max(0, x - extent / 2), width - extent), height - 10);
  }
  // Which part of the step is in view.
  const whole = EXTENT.to - EXTENT.from;
  context.fillStyle = INK.line;
  context.fillRect(0, 0, width, 3);
  context.fillStyle = INK.forward;
  const left = ((view.from - EXTENT.from) / whole) * width;
  context.fillRect(left, 0, Math.max(3, ((view.to - view.from) / whole) * width), 3);
  if (mark) {
    const [from, to] = mark.map((ms) => (ms - view.from) * scale);
    context.globalAlpha = 0.35;
    context.fillRect(Math.min(from, to), 0, Math.abs(to - from), height);
    context.globalAlpha = 1;
  }
}

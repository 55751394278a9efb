"use strict";
// What is shown. A track is a list of spans that do not overlap, as columns; a row is what lies on one height.

const DATA = JSON.parse(document.getElementById("data").textContent);

// Order of drawing and of the shares of a crowded pixel, from the top.
const CATEGORIES = [
  { key: "wait", label: "waiting for a message (exposed)" },
  { key: "forward", label: "forward" },
  { key: "input-grad", label: "backward, input gradient" },
  { key: "weight-grad", label: "backward, weight gradient" },
  { key: "other", label: "other" },
  { key: "dispatch", label: "dispatch" },
  { key: "combine", label: "combine" },
  { key: "counts", label: "token counts" },
];
const CATEGORY_OF = Object.fromEntries(CATEGORIES.map((category, index) => [category.key, index]));
const DIM = CATEGORIES.length; // what the search leaves out
const PHASES = { F: "forward", I: "input-grad", W: "weight-grad" };
const PHASE_WORDS = { F: "forward", I: "backward, input gradient", W: "backward, weight gradient" };

const COMPUTE_HEIGHT = 30;
const COMM_HEIGHT = 15;
const ROW_GAP = 4;

function category(lane, name) {
  if (lane === "wait") return CATEGORY_OF.wait;
  if (lane === "comm") return CATEGORY_OF[name.kind || "other"];
  return CATEGORY_OF[PHASES[name.phase] || "other"];
}

function madeTrack(lane, columns) {
  const categories = NAMES_OF[lane];
  return { lane, length: columns.start.length, categories, ...columns };
}

const NAMES_OF = Object.fromEntries(
  ["compute", "wait", "comm"].map((lane) => [lane, Uint8Array.from(DATA.names, (name) => category(lane, name))]),
);

const GROUPS = DATA.groups.map((group) => {
  const rows = [
    { height: COMPUTE_HEIGHT, tracks: [madeTrack("compute", group.compute), madeTrack("wait", group.wait)] },
    ...group.comm.map((columns) => ({ height: COMM_HEIGHT, tracks: [madeTrack("comm", columns)] })),
  ];
  let y = 0;
  for (const row of rows) {
    row.y = y;
    y += row.height + ROW_GAP;
  }
  const last = (track) => (track.length ? track.start[track.length - 1] + track.ms[track.length - 1] : 0);
  return { ...group, rows, height: y, opsEndMs: Math.max(...rows[0].tracks.map(last)) };
});

const EXTENT = (() => {
  let from = 0;
  let to = 0.001;
  for (const group of GROUPS) {
    to = Math.max(to, group.stepMs);
    for (const row of group.rows) {
      for (const track of row.tracks) {
        if (!track.length) continue;
        from = Math.min(from, track.start[0]);
        to = Math.max(to, track.start[track.length - 1] + track.ms[track.length - 1]);
      }
    }
  }
  return { from, to };
})();

// Index of the first span of a track that ends after a time: starts rise, and so do ends.
function firstAfter(track, ms) {
  let low = 0;
  let high = track.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.start[middle] + track.ms[middle] > ms) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Index of the first span of a track that starts at a time or later.
function firstFrom(track, ms) {
  let low = 0;
  let high = track.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.start[middle] >= ms) high = middle;
    else low = middle + 1;
  }
  return low;
}

function msText(ms) {
  const size = Math.abs(ms);
  return `${ms.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3)} ms`;
}

function bytesText(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  const [unit, size] = bytes < 1e6 ? ["kB", 1e3] : bytes < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  return `${(bytes / size).toFixed(2)} ${unit} (${bytes} bytes)`;
}

"use strict";
// Puts the parts together.

(() => {
  const by = (id) => document.getElementById(id);
  const [timeline, axis, tip, search] = [by("timeline"), by("axis"), by("tip"), by("search")];
  const canvases = new Map();
  const AXIS_HEIGHT = 26;
  const SLACK_PX = 2;
  let found = null; // by name: whether the search matches it; null without a search
  let hits = [];
  let hit = -1;
  let chosen = null;
  let mark = null;
  let is_due = false;

  const isFound = (name) => found === null || found[name] === 1;
  const view = new View(EXTENT, changed);

  function changed() {
    if (is_due) return;
    is_due = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    is_due = false;
    let drawn = 0;
    const width = axis.clientWidth;
    if (!width) return;
    drawAxis(axis, width, AXIS_HEIGHT, view, mark);
    for (const [group, canvas] of canvases) {
      const box = canvas.getBoundingClientRect();
      if (box.bottom >= 0 && box.top <= innerHeight) drawn += drawGroup(group, canvas, width, view, isFound, chosen);
    }
    by("range").textContent = `${msText(view.from)} to ${msText(view.to)}`;
    Object.assign(timeline.dataset, { from: view.from, to: view.to, drawn });
  }

  function choose(span) {
    const same = span && chosen && span.track === chosen.track && span.index === chosen.index;
    if (same || (!span && !chosen)) return;
    chosen = span;
    if (!span) tip.hidden = true;
    else fillTip(tip, span);
    changed();
  }

  function hover(group, canvas, event) {
    const box = canvas.getBoundingClientRect();
    const slack = (SLACK_PX / box.width) * (view.to - view.from);
    choose(spanAt(group, view.msAt(canvas, event.clientX), event.clientY - box.top, slack));
    if (chosen) placeTip(tip, event.clientX, event.clientY);
  }

  function find(text) {
    search.value = text;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    hits = [];
    hit = -1;
    found = null;
    by("found").textContent = "";
    if (words.length) {
      found = Uint8Array.from(DATA.names, (name) => {
        const where = `${name.text} ${name.words}`.toLowerCase();
        return words.every((word) => where.includes(word)) ? 1 : 0;
      });
      collectHits();
    }
    choose(null);
    changed();
  }

  function collectHits() {
    let ms = 0;
    for (const group of GROUPS) {
      for (const row of group.rows) {
        for (const track of row.tracks) {
          for (let index = 0; index < track.length; index++) {
            if (!isFound(track.name[index])) continue;
            hits.push({ group, row, track, index });
            ms += track.ms[index];
          }
        }
      }
    }
    hits.sort((one, other) => one.track.start[one.index] - other.track.start[other.index]);
    by("found").textContent = `${hits.length} found, ${msText(ms)} in all`;
  }

  function step(by_how_many) {
    if (!hits.length) return;
    hit = hit < 0 && by_how_many < 0 ? hits.length - 1 : (hit + by_how_many + hits.length) % hits.length;
    const span = hits[hit];
    const [start, ms] = [span.track.start[span.index], span.track.ms[span.index]];
    if (start < view.from || start + ms > view.to || ms < (view.to - view.from) / 100) {
      view.show(start + ms / 2 - 5 * ms, start + ms / 2 + 5 * ms);
    }
    const canvas = canvases.get(span.group);
    canvas.scrollIntoView({ block: "nearest" });
    choose(span);
    const box = canvas.getBoundingClientRect();
    const x = box.left + ((start + ms / 2 - view.from) / (view.to - view.from)) * box.width;
    placeTip(tip, x, box.top + span.row.y + span.row.height);
  }

  function addGroup(group) {
    const place = element("div", undefined, `group ${group.source}`);
    const canvas = element("canvas");
    canvas.style.height = `${group.height}px`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `rank ${group.rank} ${group.source}: compute above, communication below`);
    place.append(groupLabel(group), canvas);
    by("groups").append(place);
    canvases.set(group, canvas);
    zoomsByWheel(canvas, view);
    movesByDrag(canvas, view, (range) => {
      mark = range;
      changed();
    });
    canvas.addEventListener("pointermove", (event) => hover(group, canvas, event));
    canvas.addEventListener("pointerleave", () => choose(null));
  }

  function recolour() {
    readColours();
    changed();
  }

  // A rank's prediction stands right below what was measured on it.
  const order = [...GROUPS].sort((one, other) => one.rank - other.rank || one.source.localeCompare(other.source));
  order.forEach(addGroup);
  showFigures(by("figures"));
  showLegend(by("legend"));
  showSummary(by("summary"), find);
  zoomsByWheel(axis, view);
  movesByDrag(axis, view, () => {});
  followsKeys(view, search, step);
  by("in").addEventListener("click", () => view.zoom(ZOOM_STEP));
  by("out").addEventListener("click", () => view.zoom(1 / ZOOM_STEP));
  by("reset").addEventListener("click", () => view.reset());
  search.addEventListener("input", () => find(search.value));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      find("");
      search.blur();
    }
  });
  addEventListener("scroll", changed, { passive: true });
  new ResizeObserver(changed).observe(by("groups"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  recolour();
})();

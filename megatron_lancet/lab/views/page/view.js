"use strict";
// Which part of the step is in view, and how wheel, mouse and keys change it.

const NARROWEST_MS = 0.001;
const ZOOM_STEP = 1.5;
const MOVE_SHARE = 0.2;
const CLICK_PX = 4;

class View {
  constructor(extent, changed) {
    this.extent = extent;
    this.changed = changed;
    this.from = extent.from;
    this.to = extent.to;
  }

  show(from, to) {
    const whole = this.extent.to - this.extent.from;
    const length = Math.min(whole, Math.max(NARROWEST_MS, to - from));
    this.from = Math.min(Math.max(from, this.extent.from), this.extent.to - length);
    this.to = this.from + length;
    this.changed();
  }

  reset() {
    this.show(this.extent.from, this.extent.to);
  }

  // Keeps the moment `at` in its place.
  zoom(factor, at = (this.from + this.to) / 2) {
    const length = Math.min(this.extent.to - this.extent.from, Math.max(NARROWEST_MS, (this.to - this.from) / factor));
    const place = (at - this.from) / (this.to - this.from);
    this.show(at - place * length, at + (1 - place) * length);
  }

  move(ms) {
    this.show(this.from + ms, this.to + ms);
  }

  moveShare(share) {
    this.move(share * (this.to - this.from));
  }

  msAt(canvas, clientX) {
    const box = canvas.getBoundingClientRect();
    return this.from + ((clientX - box.left) / box.width) * (this.to - this.from);
  }
}

function zoomsByWheel(canvas, view) {
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const amount = sideways ? event.deltaX || event.deltaY : event.deltaY;
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (sideways) view.moveShare((amount * lines) / 1000);
      else view.zoom(Math.exp((-amount * lines) / 400), view.msAt(canvas, event.clientX));
    },
    { passive: false },
  );
}

// Drag moves; with Shift it marks a range, told to `marked`, which is shown on release.
function movesByDrag(canvas, view, marked) {
  let start = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = { x: event.clientX, from: view.from, to: view.to, at: view.msAt(canvas, event.clientX) };
    start.marks = event.shiftKey;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!start) return;
    if (start.marks) {
      marked([start.at, view.msAt(canvas, event.clientX)]);
      return;
    }
    canvas.classList.add("moving");
    const ms = ((event.clientX - start.x) / canvas.getBoundingClientRect().width) * (start.to - start.from);
    view.show(start.from - ms, start.to - ms);
  });
  const release = (event) => {
    if (!start) return;
    const { marks, at, x } = start;
    start = null;
    canvas.classList.remove("moving");
    marked(null);
    if (marks && event.type === "pointerup" && Math.abs(event.clientX - x) > CLICK_PX) {
      const end = view.msAt(canvas, event.clientX);
      view.show(Math.min(at, end), Math.max(at, end));
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
}

function followsKeys(view, search, step) {
  const keys = {
    "+": () => view.zoom(ZOOM_STEP),
    "=": () => view.zoom(ZOOM_STEP),
    "-": () => view.zoom(1 / ZOOM_STEP),
    _: () => view.zoom(1 / ZOOM_STEP),
    0: () => view.reset(),
    ArrowLeft: () => view.moveShare(-MOVE_SHARE),
    ArrowRight: () => view.moveShare(MOVE_SHARE),
    "/": () => search.focus(),
    n: () => step(1),
    p: () => step(-1),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === search) return;
    const action = keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

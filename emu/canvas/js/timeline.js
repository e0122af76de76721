// What every stream of every rank does and when, on one canvas. Two layers are kept: all bars in full, and the same page
// with faded bars. A step puts them together, full up to each row's last issued bar, and draws where the hosts stand.

import { FONT, sized, timeText } from "./paint.js";
import { barsOfSpans, barsOfSteps } from "./bars.js";
import { AXIS, Layers, RIGHT, TOP } from "./layers.js";
import { Undo, make, mark, panel, write } from "./dom.js";
import { listen } from "./pointer.js";

const MOST_HEIGHT = 490;
const RANK_GAP = 0.35; // rows

/** The timeline's part of the page. */
export class Timeline {
  /** @param {object} app what is shown: recording, index, selected, inks, goto(index) */
  constructor(app) {
    this.app = app;
    this.canvas = make("canvas", { role: "img", tabindex: "0", class: "plot grab" });
    this.tip = make("div", { class: "tip", hidden: true, role: "tooltip" });
    this.legend = make("ul", { class: "legend", "aria-label": "legend of the timeline" });
    this.by = make("button", { class: "small", type: "button", onclick: () => this.switchAxis() });
    const { root, note } = panel("Timeline", "timeline", this.by);
    this.note = note;
    this.plot = make("div", { class: "plotbox" }, this.canvas, this.tip);
    root.append(this.plot, this.legend);
    this.root = root;
    this.layers = new Layers();
    this.view = null; // [low, high] that is zoomed to; null: all
    this.top = 0; // the first pixel of the rows that is seen
    this.steps = false; // whether to show bars by step, where there are times too
    this.undo = new Undo();
    listen(this);
  }

  /** There are other bars: more steps, or new prices. */
  renew(what = "all") {
    const { recording } = this.app;
    const priced = recording.spans.n > 0;
    if (what === "rows" && priced && !this.by_step) return; // rows without times change no bar
    this.by_step = priced ? Boolean(this.steps) : true;
    this.bars = this.by_step ? barsOfSteps(recording) : barsOfSpans(recording);
    this.longest = this.by_step ? Math.max(recording.known, 1) : Math.max(recording.step_time_s || 0, this.bars.longest, 1e-12);
    this.by.hidden = !priced;
    write(this.by, this.by_step ? "by time" : "by step");
    this.by.title = this.by_step ? "show bars in time" : "show one bar a step, all of the same length";
    this._place();
    this._legend();
    this.stale = true;
  }

  switchAxis() {
    this.steps = !this.by_step;
    this.view = null;
    this.renew();
    this.draw();
  }

  /** Where the rows are, from the top, in pixels. */
  _place() {
    const { rows } = this.bars;
    let gaps = 0;
    for (let i = 1; i < rows.length; i++) gaps += rows[i].rank !== rows[i - 1].rank ? RANK_GAP : 0;
    const room = Math.max(rows.length + gaps, 1);
    this.pitch = Math.min(Math.max((MOST_HEIGHT - AXIS - TOP) / room, 11), 24);
    let y = 0;
    this.places = rows.map((row, i) => {
      if (i && row.rank !== rows[i - 1].rank) y += RANK_GAP * this.pitch;
      y += this.pitch;
      return y - this.pitch;
    });
    this.tall = Math.max(y, this.pitch);
    // Where not all fit, what is seen ends with a row.
    const most = MOST_HEIGHT - AXIS - TOP;
    const fits = this.tall < most + 1 ? this.tall : Math.max(...this.places.map((place) => place + this.pitch).filter((end) => end <= most));
    this.height = fits + AXIS + TOP;
    this.scrollTo(this.top);
  }

  _legend() {
    const { inks } = this.app;
    const entries = this.bars.paints.flatMap((paint, i) => (this.bars.used.has(i) ? [[paint, paint.name || "other kernels"]] : []));
    if (this.bars.used.has(-1)) entries.push([null, "other steps"]);
    if (this.bars.waits) entries.push(["waiting", "waiting for other ranks"]);
    this.legend.replaceChildren(
      ...entries.map(([paint, name]) => make("li", {}, this.layers.brushes.swatch(paint, inks), name)),
      make("li", {}, make("span", { class: "cursor-mark next" }), this.by_step ? "next step" : "host of the next rank"),
      ...(this.by_step ? [] : [make("li", {}, make("span", { class: "cursor-mark" }), "other hosts")]),
      make("li", {}, "pale: to come"),
    );
  }

  /** Pixels of rows that are seen at once. */
  get seen() {
    return this.height - AXIS - TOP;
  }

  /** The row at a height of the canvas, or -1. */
  rowAt(y) {
    const at = y - TOP + this.top;
    if (y < TOP || y > this.height - AXIS) return -1;
    return this.places.findIndex((place) => at >= place && at < place + this.pitch);
  }

  /** The time at a pixel from the left, in seconds or steps. */
  timeAt(x) {
    return this.window[0] + (x - this.left) / this.scale;
  }

  /** The share 0-1 of the width at a pixel from the left. */
  shareAt(x) {
    return Math.min(Math.max((x - this.left) / (this.width - this.left - RIGHT), 0), 1);
  }

  /** What is seen: [low, high] in seconds or steps. */
  get window() {
    return this.view || [0, this.longest * 1.005];
  }

  /** Zooms by a factor around a share 0-1 of the width; 0 shows all. */
  zoom(factor, share = this._shareOfCursor()) {
    const [low, high] = this.window;
    const all = this.longest * 1.005;
    const length = factor ? Math.max((high - low) / factor, all * 1e-6) : all;
    if (length >= all) this.view = null;
    else {
      const at = Math.min(Math.max(low + share * (high - low - length), 0), all - length);
      this.view = [at, at + length];
    }
    this.stale = true;
    this.draw();
  }

  /** Moves what is seen, by shares of its length. */
  pan(share) {
    if (!this.view) return;
    const [low, high] = this.view;
    const at = Math.min(Math.max(low + share * (high - low), 0), this.longest * 1.005 - (high - low));
    this.view = [at, at + high - low];
    this.stale = true;
    this.draw();
  }

  _shareOfCursor() {
    const [low, high] = this.window;
    const at = this._cursor(this.app.next_rank ?? this.app.selected);
    return at === null || at < low || at > high ? 0.5 : (at - low) / (high - low);
  }

  /** Where a rank's host stands; null where that is not known. */
  _cursor(rank) {
    const { recording, index } = this.app;
    if (this.by_step) return rank === this.app.next_rank ? index : null;
    const row = recording.host.at(rank, index);
    if (row < 0) return rank === this.app.next_rank ? 0 : null;
    return recording.hosts.column("at_s")[row];
  }

  /** After a move: brings the next rank's host into what is seen. */
  follow() {
    const { next_rank } = this.app;
    if (next_rank !== null && this.tall > this.seen) this.reveal(next_rank);
    const at = next_rank === null ? null : this._cursor(next_rank);
    const [low, high] = this.window;
    if (!this.view || at === null || (at >= low && at <= high)) return;
    const from = Math.min(Math.max(at - (high - low) / 2, 0), this.longest * 1.005 - (high - low));
    this.view = [from, from + high - low];
    this.stale = true;
  }

  /** Scrolls to the rows of a rank. */
  reveal(rank) {
    const rows = this.bars.rows.flatMap((row, i) => (row.rank === rank ? [i] : []));
    if (!rows.length) return;
    const { seen } = this;
    const from = this.places[rows[0]];
    const to = this.places[rows[rows.length - 1]] + this.pitch;
    const top = Math.min(Math.max(this.top, to - seen), from);
    this.scrollTo(top);
  }

  /** Shows the rows from a pixel of all of them on; says whether that is news. */
  scrollTo(top) {
    const before = this.top;
    this.top = Math.min(Math.max(top, 0), Math.max(this.tall - this.seen, 0));
    if (this.top !== before) this.stale = true;
    return this.top !== before;
  }

  _measure() {
    const width = Math.max(this.plot.clientWidth, 200);
    if (width === this.width && !this.stale) return;
    const context = this.canvas.getContext("2d");
    context.font = `11px ${FONT}`;
    const names = [...new Set(this.bars.rows.map((row) => row.name))].map((name) => context.measureText(name).width);
    context.font = `bold 11px ${FONT}`;
    const [rank] = this.app.recording.ranks.slice(-1);
    this.names_from = context.measureText(`rank ${rank}`).width + 10;
    this.left = Math.round(this.names_from + Math.min(Math.max(0, ...names), width < 640 ? 70 : 130) + 12);
    this.width = width;
    const [low, high] = this.window;
    this.scale = (width - this.left - RIGHT) / (high - low);
    this.layers.draw(this);
    this.stale = false;
  }

  /** Visits the rows that are seen: visit(row, y of its top). */
  each(visit) {
    for (let row = 0; row < this.bars.rows.length; row++) {
      const y = TOP + this.places[row] - this.top;
      if (y > TOP - this.pitch && y < this.height - AXIS) visit(row, y);
    }
  }

  /** Shows the step: joins the layers, and draws what moves. */
  draw() {
    const { inks, index, next_rank, selected } = this.app;
    this._measure();
    const context = sized(this.canvas, this.width, this.height);
    context.fillStyle = inks.tint;
    this.each((row, y) => {
      const from = Math.max(y, TOP);
      if (this.bars.rows[row].rank === selected) context.fillRect(0, from, this.left, Math.min(y + this.pitch, this.height - AXIS) - from);
    });
    this.layers.join(context, this, index);
    this._cursors(context, inks, this.window[0], next_rank);
    this._say();
  }

  _cursors(context, inks, low, next_rank) {
    const extents = new Map();
    this.each((row, y) => {
      const { rank } = this.bars.rows[row];
      const own = extents.get(rank);
      extents.set(rank, [own ? own[0] : Math.max(y, TOP - 4), Math.min(y + this.pitch, this.height - AXIS + 4)]);
    });
    for (const [rank, [from, to]] of extents) {
      const at = this._cursor(rank);
      const x = at === null ? -1 : this.left + (at - low) * this.scale;
      if (x < this.left - 0.5 || x > this.width - RIGHT + 1) continue;
      const next = rank === next_rank;
      context.strokeStyle = context.fillStyle = next ? inks.cursor : inks.faint;
      context.lineWidth = next ? 2.4 : 1.1;
      context.setLineDash(next ? [] : [3, 3]);
      context.beginPath();
      context.moveTo(x, from);
      context.lineTo(x, to);
      context.stroke();
      context.setLineDash([]);
      if (!next) continue;
      context.beginPath();
      context.moveTo(x - 5, from - 8);
      context.lineTo(x + 5, from - 8);
      context.lineTo(x, from);
      context.fill();
    }
  }

  _say() {
    const { recording, index } = this.app;
    const zoomed = this.view ? "; zoomed" : "";
    const hidden = this.tall > this.seen + 1 ? "; scroll for more ranks" : "";
    const what = this.by_step ? "one bar a step" : `${timeText(recording.step_time_s)} on ${recording.about.cluster}`;
    write(this.note, `${what}${zoomed}${hidden}`);
    const rows = this.bars.rows.length;
    mark(this.canvas, "aria-label", `Timeline: ${rows} streams, ${this.bars.n} bars, ${what}; issued up to step ${index}`);
  }

  /** Moves the rows up by pixels; says whether they moved. */
  scroll(by) {
    if (!this.scrollTo(this.top + by)) return false;
    this.draw();
    return true;
  }
}

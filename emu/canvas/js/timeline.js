// What every stream of every rank does and when, on one canvas. Two layers are kept: all bars in full, and the same page
// with faded bars. A step puts them together, full up to each row's last issued bar, and draws where the hosts stand.

import { Brushes, FONT, cutText, sized, ticksOf, timeText, timeUnit } from "./paint.js";
import { barsOfSpans, barsOfSteps, drawRow } from "./bars.js";
import { Undo, make, mark, panel, write } from "./dom.js";
import { listen } from "./pointer.js";

const AXIS = 34; // pixels under the rows
const TOP = 14; // above them, for the triangle of the next rank
const RIGHT = 14; // beside them
const MOST_HEIGHT = 430;
const RANK_GAP = 0.35; // rows
const FADED = 0.26;

/** The timeline's part of the page. */
export class Timeline {
  /** @param {object} app what is shown: recording, index, selected, inks, goto(index) */
  constructor(app) {
    this.app = app;
    this.brushes = new Brushes();
    this.canvas = make("canvas", { role: "img", tabindex: "0", class: "plot grab" });
    this.tip = make("div", { class: "tip", hidden: true, role: "tooltip" });
    this.legend = make("ul", { class: "legend", "aria-label": "legend of the timeline" });
    this.by = make("button", { class: "small", type: "button", onclick: () => this.switchAxis() });
    const { root, note } = panel("Timeline", "timeline", this.by);
    this.note = note;
    this.plot = make("div", { class: "plotbox" }, this.canvas, this.tip);
    root.append(this.plot, this.legend);
    this.root = root;
    this.full = document.createElement("canvas");
    this.faded = document.createElement("canvas");
    this.view = null; // [low, high] that is zoomed to; null: all
    this.top = 0; // the first pixel of the rows that is seen
    this.steps = null; // true: by step; false: by time; null: by what there is
    this.undo = new Undo();
    listen(this);
  }

  /** There are other bars: more steps, or new prices. */
  renew() {
    const { recording } = this.app;
    const priced = recording.spans.n > 0;
    this.by_step = this.steps ?? !priced;
    if (!priced) this.by_step = true;
    this.bars = this.by_step ? barsOfSteps(recording) : barsOfSpans(recording);
    this.longest = Math.max(this.by_step ? recording.known : Math.max(recording.step_time_s || 0, this.bars.longest), 1e-12);
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
    this.pitch = Math.min(Math.max((MOST_HEIGHT - AXIS - TOP) / room, 12), 24);
    let y = 0;
    this.places = rows.map((row, i) => {
      if (i && row.rank !== rows[i - 1].rank) y += RANK_GAP * this.pitch;
      y += this.pitch;
      return y - this.pitch;
    });
    this.tall = Math.max(y, this.pitch);
    this.height = Math.min(this.tall, MOST_HEIGHT - AXIS - TOP) + AXIS + TOP;
  }

  _legend() {
    const { inks } = this.app;
    const entries = this.bars.paints.flatMap((paint, i) => (this.bars.used.has(i) ? [[paint, paint.name || "other kernels"]] : []));
    if (this.bars.used.has(-1)) entries.push([null, "other steps"]);
    if (this.bars.waits) entries.push(["waiting", "waiting for other ranks"]);
    this.legend.replaceChildren(
      ...entries.map(([paint, name]) => make("li", {}, this.brushes.swatch(paint, inks), name)),
      make("li", {}, make("span", { class: "cursor-mark next" }), "host of the next rank"),
      make("li", {}, make("span", { class: "cursor-mark" }), "other hosts; pale: to come"),
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
    if (this.by_step) return index;
    const row = recording.host.at(rank, index);
    return row < 0 ? null : recording.hosts.column("at_s")[row];
  }

  /** Brings the next rank's host and the selected rank's rows into what is seen. */
  follow() {
    const at = this._cursor(this.app.next_rank ?? this.app.selected);
    if (this.view && at !== null) {
      const [low, high] = this.view;
      if (at < low || at > high) this.pan((at - low) / (high - low) - 0.5);
    }
  }

  /** Scrolls to the rows of a rank. */
  reveal(rank) {
    const rows = this.bars.rows.flatMap((row, i) => (row.rank === rank ? [i] : []));
    if (!rows.length) return;
    const { seen } = this;
    const from = this.places[rows[0]];
    const to = this.places[rows[rows.length - 1]] + this.pitch;
    const top = Math.min(Math.max(this.top, to - seen), from);
    if (top !== this.top) {
      this.top = Math.max(Math.min(top, this.tall - seen), 0);
      this.stale = true;
    }
  }

  _measure() {
    const width = Math.max(this.plot.clientWidth, 200);
    const context = this.canvas.getContext("2d");
    context.font = `11px ${FONT}`;
    const names = new Set(this.bars.rows.map((row) => row.name));
    const name = Math.min(Math.max(0, ...[...names].map((each) => context.measureText(each).width)), width < 640 ? 70 : 130);
    context.font = `bold 11px ${FONT}`;
    const rank = Math.max(...this.app.recording.ranks.slice(-1).map((each) => context.measureText(`rank ${each}`).width));
    this.gutter = [rank + 10, Math.round(rank + name + 22)];
    this.width = width;
    this.left = this.gutter[1];
  }

  /** Draws the two layers anew. */
  _layers() {
    const { inks } = this.app;
    const scale = window.devicePixelRatio || 1;
    const full = sized(this.full, this.width, this.height, scale);
    const page = sized(this.faded, this.width, this.height, scale);
    const [low, high] = this.window;
    const span = this.width - this.left - RIGHT;
    this.scale = span / (high - low);
    const view = { low, high, left: this.left, scale: this.scale, pixel: 1 / scale };
    full.fillStyle = inks.ground;
    full.fillRect(0, 0, this.width, this.height);
    const seen = [TOP, this.height - AXIS];
    for (const context of [full, page]) {
      context.save();
      context.beginPath();
      context.rect(0, seen[0] - 2, this.width, seen[1] - seen[0] + 4);
      context.clip();
    }
    this._each((row, y) => drawRow(full, this.bars, row, view, y + 0.13 * this.pitch, 0.74 * this.pitch, this.brushes, inks));
    this._each((row, y) => {
      page.fillStyle = inks.line;
      page.fillRect(this.left, y + 0.87 * this.pitch, span, 1);
    });
    page.globalAlpha = FADED;
    page.drawImage(this.full, this.left * scale, 0, (span + 1) * scale, this.full.height, this.left, 0, span + 1, this.height);
    page.globalAlpha = 1;
    this._names(page, inks);
    for (const context of [full, page]) context.restore();
    this._axis(page, inks, low, high);
    this.stale = false;
  }

  _each(visit) {
    for (let row = 0; row < this.bars.rows.length; row++) {
      const y = TOP + this.places[row] - this.top;
      if (y > TOP - this.pitch && y < this.height - AXIS) visit(row, y);
    }
  }

  _names(context, inks) {
    const { rows } = this.bars;
    const small = Math.min(11, this.pitch - 1);
    context.textBaseline = "middle";
    this._each((row, y) => {
      const middle = y + this.pitch / 2;
      context.fillStyle = inks.faint;
      context.font = `${small}px ${FONT}`;
      context.textAlign = "right";
      context.fillText(cutText(context, rows[row].name, this.left - this.gutter[0] - 8), this.left - 7, middle);
      if (row && rows[row - 1].rank === rows[row].rank && y > TOP) return;
      context.fillStyle = inks.ink;
      context.font = `bold ${small}px ${FONT}`;
      context.textAlign = "left";
      context.fillText(`rank ${rows[row].rank}`, 4, middle);
    });
  }

  _axis(context, inks, low, high) {
    const [unit, unit_s] = this.by_step ? ["steps", 1] : timeUnit(high);
    const y = this.height - AXIS + 4;
    context.fillStyle = context.strokeStyle = inks.faint;
    context.lineWidth = 1;
    context.strokeRect(this.left, y, this.width - this.left - RIGHT, 0);
    context.font = `10.5px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const at of ticksOf(low / unit_s, high / unit_s, (this.width - this.left) / 80)) {
      const x = this.left + (at * unit_s - low) * this.scale;
      context.fillRect(x - 0.5, y, 1, 4);
      context.fillText(String(Number(at.toPrecision(6))), x, y + 6);
    }
    context.textAlign = "right";
    const what = this.by_step ? "steps taken, of all ranks" : `time (${unit})${this.app.recording.provisional ? ", provisional" : ""}`;
    context.fillText(what, this.width - RIGHT, y + 19);
  }

  /** Puts the layers together for the step that is shown. */
  draw() {
    const { inks, index, next_rank, selected } = this.app;
    if (!this.bars) this.renew();
    const before = this.width;
    this._measure();
    if (before !== this.width) this.stale = true;
    if (this.stale) this._layers();
    const scale = window.devicePixelRatio || 1;
    const context = sized(this.canvas, this.width, this.height, scale);
    context.fillStyle = inks.tint;
    this._each((row, y) => {
      if (this.bars.rows[row].rank === selected) context.fillRect(0, Math.max(y, TOP), this.width, Math.min(this.pitch, this.height - AXIS - y));
    });
    context.drawImage(this.faded, 0, 0, this.width, this.height);
    const [low] = this.window;
    this._each((row, y) => {
      const until = Math.min(this.left + (this.bars.issuedUntil(row, index) - low) * this.scale, this.width - RIGHT);
      const from = Math.max(y + 0.13 * this.pitch, TOP);
      const tall = Math.min(y + 0.87 * this.pitch, this.height - AXIS) - from;
      if (until <= this.left || tall <= 0) return;
      const [w, h] = [until - this.left, tall];
      context.drawImage(this.full, this.left * scale, from * scale, w * scale, h * scale, this.left, from, w, h);
    });
    this._cursors(context, inks, low, next_rank);
    this._say();
  }

  _cursors(context, inks, low, next_rank) {
    const extents = new Map();
    this._each((row, y) => {
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
    const top = Math.min(Math.max(this.top + by, 0), Math.max(this.tall - this.seen, 0));
    if (top === this.top) return false;
    this.top = top;
    this.stale = true;
    this.draw();
    return true;
  }
}

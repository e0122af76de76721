// The bars of a timeline: each row's in the order of time, so that what is seen is found by a binary search, and drawn
// so that a hundred thousand are no more work than the pixels they cover.

import { countBelow } from "./record.js";

/** Bars in rows. Times are in seconds, or in steps where nothing is priced. */
export class Bars {
  /**
   * @param {{rank: number, name: string}[]} rows
   * @param {object} columns row, start, moves, end, paint, label, step: arrays of n numbers; alone: gives one
   * @param {number} n
   * @param {{name: string, colour: string, hatch: string}[]} paints of which columns.paint are numbers; -1: none of them
   */
  constructor(rows, columns, n, paints) {
    this.rows = rows;
    this.paints = paints;
    this.n = n;
    this.first = new Int32Array(rows.length + 1);
    for (let i = 0; i < n; i++) this.first[columns.row[i] + 1] += 1;
    for (let r = 0; r < rows.length; r++) this.first[r + 1] += this.first[r];
    const order = orderOf(columns, n, this.first);
    for (const name of ["start", "moves", "end", "paint", "label", "step"]) this[name] = ordered(columns[name], order, n);
    this._alone = () => ordered(columns.alone?.(), order, n); // few ask for it
    // The furthest end, and the latest step, up to each bar: both ascend, whatever the bars do.
    this.reach = running(this.end, this.first);
    this.issue = running(this.step, this.first);
    this.longest = 0;
    for (let r = 0; r < rows.length; r++) if (this.first[r + 1] > this.first[r]) this.longest = Math.max(this.longest, this.reach[this.first[r + 1] - 1]);
    this.used = new Set();
    this.waits = false;
    for (let i = 0; i < n; i++) {
      if (i === 0 || this.paint[i] !== this.paint[i - 1]) this.used.add(this.paint[i]);
      if (this.moves[i] > this.start[i]) this.waits = true;
    }
  }

  /** How long each would last alone; nothing where that is not known. */
  get alone() {
    return (this._lone ??= this._alone());
  }

  /** The bars of a row that reach into a window: [from, to). */
  within(row, low, high) {
    const from = this.first[row];
    const to = this.first[row + 1];
    return [
      from + countBelow(this.reach.subarray(from, to), low),
      from + countBelow(this.start.subarray(from, to), high),
    ];
  }

  /** Where a row's issued bars end at a step; -1 where none is issued. */
  issuedUntil(row, index) {
    const from = this.first[row];
    const count = countBelow(this.issue.subarray(from, this.first[row + 1]), index + 1);
    return count ? this.reach[from + count - 1] : -1;
  }

  /** The bar of a row at a time, or the nearest within some distance; -1 where there is none. */
  at(row, time, near) {
    const [from, to] = this.within(row, time - near, time + near);
    let best = -1;
    let least = Infinity;
    for (let i = from; i < to; i++) {
      const off = Math.max(this.start[i] - time, time - this.end[i], 0);
      if (off <= near && off < least) [best, least] = [i, off];
    }
    return best;
  }
}

/** Bars by row, then by start; null where they are so already, as Python writes them. */
function orderOf({ row, start }, n, first) {
  let sorted = true;
  for (let i = 1; i < n && sorted; i++) sorted = row[i] > row[i - 1] || (row[i] === row[i - 1] && start[i] >= start[i - 1]);
  if (sorted) return null;
  const order = new Int32Array(n);
  const next = first.slice();
  for (let i = 0; i < n; i++) order[next[row[i]]++] = i;
  for (let r = 0; r + 1 < first.length; r++) order.subarray(first[r], first[r + 1]).sort((a, b) => start[a] - start[b] || a - b);
  return order;
}

function ordered(column, order, n) {
  if (!column || !order) return column && column.subarray(0, n);
  const found = new column.constructor(n);
  for (let i = 0; i < n; i++) found[i] = column[order[i]];
  return found;
}

function running(values, first) {
  const most = values.slice();
  for (let r = 0; r + 1 < first.length; r++) {
    for (let i = first[r] + 1; i < first[r + 1]; i++) if (most[i - 1] > most[i]) most[i] = most[i - 1];
  }
  return most;
}

/** Every step as a bar of one step's length: what is shown where nothing is priced. */
export function barsOfSteps(recording) {
  const { steps } = recording.tables;
  const { n } = steps;
  const ranks = steps.column("rank");
  const ops = steps.column("op");
  const paints = new Map(recording.palette.map((paint, i) => [paint.name, i]));
  const own = new Map(recording.ranks.map((rank) => [rank, new Map()])); // rank -> stream -> row, once they are counted
  for (let i = 0; i < n; i++) own.get(ranks[i]).set(recording.op(ops[i]).stream, 0);
  const rows = [];
  for (const [rank, streams] of own) {
    for (const stream of streams.keys()) streams.set(stream, rows.push({ rank, name: stream || "host" }) - 1);
  }
  const row = new Int32Array(n);
  const paint = new Int32Array(n);
  const label = new Int32Array(n);
  const start = Float64Array.from({ length: n }, (_, i) => i);
  const labels = recording.tables.ops.column("label");
  for (let i = 0; i < n; i++) {
    const op = recording.op(ops[i]);
    row[i] = own.get(ranks[i]).get(op.stream);
    paint[i] = paints.get(op.name) ?? paints.get(op.phase) ?? (op.kind === "kernel" ? paints.get("other kernels") : undefined) ?? -1;
    label[i] = labels[ops[i]];
  }
  const end = start.map((at) => at + 1);
  const columns = { row, start, moves: start, end, paint, label, step: end };
  return new Bars(rows, columns, n, recording.palette);
}

/** The bars of what is priced. */
export function barsOfSpans(recording) {
  const { spans, rows } = recording;
  const column = (name) => spans.column(name);
  const columns = { row: column("row"), start: column("start_s"), moves: column("moves_s"), end: column("end_s") };
  Object.assign(columns, { paint: column("paint"), label: column("label"), step: column("step") });
  if (spans.has("alone_s")) columns.alone = () => column("alone_s");
  return new Bars(rows, columns, spans.n, recording.paints);
}

/**
 * Draws a row's bars within a window. Bars thinner than a pixel are gathered: each pixel shows the share of its time that
 * every colour takes, so a row that is busy a fifth of its time looks a fifth busy.
 * @param {object} view {low, high, left, scale: CSS pixels to a second, pixel: CSS pixels to a screen pixel}
 * @param {Strip} strip of as many screen pixels as the context is wide
 */
export function drawRow(context, bars, row, view, y, height, brushes, inks, strip) {
  const { paints } = bars;
  const [from, to] = bars.within(row, view.low, view.high);
  const { left, low, scale, pixel } = view;
  const right = left + (view.high - low) * scale;
  strip.clear(paints);
  for (let i = from; i < to; i++) {
    const x0 = Math.max(left + (bars.start[i] - low) * scale, left);
    const x1 = Math.min(left + (bars.end[i] - low) * scale, right);
    if (x1 - x0 < 1.5 * pixel) {
      strip.add(x0 / pixel, Math.max(x1 / pixel, x0 / pixel + 1e-6), bars.paint[i]);
      continue;
    }
    const xm = Math.min(Math.max(left + (bars.moves[i] - low) * scale, x0), x1);
    if (xm - x0 >= 2) {
      context.strokeStyle = inks.edge;
      context.lineWidth = 0.8;
      context.strokeRect(x0 + 0.5, y + 0.5, xm - x0 - 1, height - 1);
    }
    brushes.area(context, paints[bars.paint[i]], xm, y, x1 - xm, height, inks, 1 / pixel);
    if (x1 - xm > 4) {
      context.fillStyle = inks.ground; // a seam, so that one operation is told from the next
      context.fillRect(x1 - 0.7, y, 0.7, height);
    }
  }
  strip.draw(context, y, height, pixel);
}

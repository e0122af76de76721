// Device memory: a stacked bar of every rank where it stands, and one rank's memory over all steps that are known.

import { Brushes, FONT, bytesText, centred, sampleRanks, sized, ticksOf } from "./paint.js";
import { countBelow } from "./record.js";
import { Undo, make, mark, panel, write } from "./dom.js";

const MOST_RANKS = 24;
const CHART = 118; // pixels of the chart over steps, its axis among them
const AXIS_ROOM = 30;

function byteUnit(largest) {
  const units = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
  return units.find(([, size]) => largest >= 0.9 * size) || ["B", 1];
}

/** The memory part of the page. */
export class Memory {
  /** @param {object} app what is shown: recording, state, index, selected, inks, goto(index) */
  constructor(app) {
    this.app = app;
    this.brushes = new Brushes();
    this.bars = make("canvas", { role: "img", class: "plot" });
    this.chart = make("canvas", { role: "img", class: "plot pick" });
    this.kept = document.createElement("canvas");
    this.legend = make("ul", { class: "legend", "aria-label": "legend of memory" });
    this.caption = make("p", { class: "caption" });
    const { root, note } = panel("Device memory", "memory");
    this.note = note;
    this.root = root;
    this.plot = make("div", { class: "plotbox" }, this.bars);
    this.over = make("div", { class: "plotbox" }, this.chart);
    root.append(this.plot, this.legend, this.caption, this.over);
    this.undo = new Undo();
    this.undo.on(this.chart, "click", (event) => {
      const share = (event.offsetX - this.left) / (this.width - this.left - 8);
      app.travel.goto(Math.round(Math.min(Math.max(share, 0), 1) * app.recording.last));
    });
  }

  /** More is known: the longest bar, and which categories there are. */
  renew() {
    const { recording } = this.app;
    const { memory, peaks } = recording.tables;
    if (this.of !== recording) Object.assign(this, { of: recording, seen: [0, 0], most: 0, ids: new Set() });
    const peak = peaks.column("bytes");
    for (; this.seen[0] < peaks.n; this.seen[0]++) this.most = Math.max(this.most, peak[this.seen[0]]);
    const bytes = memory.column("bytes");
    const category = memory.column("category");
    for (; this.seen[1] < memory.n; this.seen[1]++) if (bytes[this.seen[1]] > 0) this.ids.add(category[this.seen[1]]);
    this.used = recording.about.categories.map((each, i) => ({ ...each, id: i })).filter((each) => this.ids.has(each.id));
    this.stale = true;
    const names = this.used.map((each) => make("li", {}, this.brushes.swatch(each, this.app.inks), each.name));
    const most = make("li", {}, make("span", { class: "peak-mark" }), "most so far");
    this.legend.replaceChildren(...names, most);
  }

  draw() {
    if (!this.used) this.renew();
    const width = Math.max(this.plot.clientWidth, 180);
    if (width !== this.width) this.stale = true;
    this.width = width;
    this._bars();
    this._chart();
  }

  _bars() {
    const { recording, state, inks, selected, next_rank } = this.app;
    const capacity = recording.about.capacity_bytes;
    const ranks = sampleRanks(recording.ranks, MOST_RANKS, [selected, next_rank]);
    const shown = state.ranks.filter((each) => ranks.includes(each.rank));
    const pitch = Math.min(Math.max(260 / Math.max(shown.length, 1), 15), 26);
    const height = shown.length * pitch + AXIS_ROOM;
    const context = sized(this.bars, this.width, height);
    context.font = `11px ${FONT}`;
    const left = Math.ceil(context.measureText(`rank ${recording.ranks[recording.ranks.length - 1]}`).width) + 12;
    const near = capacity && capacity <= 2.5 * this.most; // a line far to the right would squeeze the bars to nothing
    const end = Math.max(this.most, near ? capacity : 0, 1);
    const room = this.width - left - (near ? 12 : 66);
    const scale = room / end;
    const [unit, unit_bytes] = byteUnit(end);
    context.textBaseline = "middle";
    shown.forEach((rank, i) => {
      const y = i * pitch + 2;
      const tall = pitch - 5;
      const next = rank.state === "next";
      if (rank.rank === selected) {
        context.fillStyle = inks.tint;
        context.fillRect(0, i * pitch, this.width, pitch);
      }
      context.fillStyle = next ? inks.cursor : inks.ink;
      context.font = `${next ? "bold " : ""}11px ${FONT}`;
      context.textAlign = "left";
      context.fillText(`rank ${rank.rank}`, 4, y + tall / 2);
      let x = left;
      for (const category of this.used) {
        const w = rank.hbm[category.name] * scale;
        if (w > 0) this.brushes.area(context, category, x, y, Math.max(w, 0.5), tall, inks);
        x += w;
      }
      const held = Object.values(rank.hbm).reduce((sum, bytes) => sum + bytes, 0);
      const peak = left + rank.peak_bytes * scale;
      context.fillStyle = inks.ink;
      context.fillRect(peak - 0.75, y - 1, 1.5, tall + 2);
      context.font = `10.5px ${FONT}`;
      const text = bytesText(held);
      const wide = context.measureText(text).width;
      const beside = Math.abs(peak - x) < wide + 10 ? Math.max(peak, x) + 5 : x + 5;
      const fits = beside + wide < this.width - 2;
      if (!fits) {
        context.fillStyle = inks.ground;
        context.fillRect(this.width - wide - 8, y + 1, wide + 6, tall - 2);
        context.fillStyle = inks.ink;
      }
      context.fillText(text, fits ? beside : this.width - wide - 5, y + tall / 2);
    });
    this._axis(context, height - AXIS_ROOM + 2, left, room, end / unit_bytes, `device memory (${unit})`, inks);
    if (near) this._capacity(context, left + capacity * scale, height - AXIS_ROOM, inks);
    const hidden = ranks.length < recording.ranks.length ? `; ${ranks.length} of ${recording.ranks.length} ranks shown` : "";
    const share = capacity ? `a device has ${bytesText(capacity)}` : "";
    write(this.note, `${share}${hidden}`);
    const says = shown.map((each) => `rank ${each.rank} ${bytesText(Object.values(each.hbm).reduce((a, b) => a + b, 0))}`);
    mark(this.bars, "aria-label", `Device memory by category: ${says.join(", ")}`);
  }

  _axis(context, y, left, room, end, label, inks) {
    context.fillStyle = inks.faint;
    context.fillRect(left, y, room, 1);
    context.font = `10px ${FONT}`;
    context.textBaseline = "top";
    for (const [at, text] of ticksOf(0, end, room / 60)) {
      const x = left + (at / end) * room;
      context.fillRect(x - 0.5, y, 1, 3);
      centred(context, text, x, y + 4, 0, this.width);
    }
    context.textAlign = "right";
    context.fillText(label, left + room, y + 16);
  }

  _capacity(context, x, bottom, inks) {
    context.strokeStyle = inks.cursor;
    context.lineWidth = 1.5;
    context.setLineDash([5, 3]);
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, bottom);
    context.stroke();
    context.setLineDash([]);
  }

  /** Memory of the selected rank over all known steps: kept, but for the line of now. */
  _chart() {
    const { recording, selected, inks, index } = this.app;
    const key = `${selected} ${recording.known}`;
    if (this.stale || this.key !== key) {
      this._area(sized(this.kept, this.width, CHART), selected, inks);
      this.key = key;
      this.stale = false;
      write(this.caption, `rank ${selected} over all known steps; click to go there`);
      mark(this.chart, "aria-label", `Memory of rank ${selected} over ${recording.known} steps`);
    }
    const context = sized(this.chart, this.width, CHART);
    context.drawImage(this.kept, 0, 0, this.width, CHART);
    const x = this.left + (index / Math.max(recording.last, 1)) * (this.width - this.left - 8);
    context.fillStyle = inks.cursor;
    context.fillRect(x - 1, 0, 2, CHART - AXIS_ROOM);
  }

  _area(context, rank, inks) {
    const { recording } = this.app;
    const [unit, unit_bytes] = byteUnit(this.most);
    context.font = `10px ${FONT}`;
    this.left = Math.max(44, Math.ceil(context.measureText(`888 ${unit}`).width) + 10);
    const room = this.width - this.left - 8;
    const tall = CHART - AXIS_ROOM - 6;
    const last = Math.max(recording.last, 1);
    const stacks = this._stacks(rank, Math.floor(room), last);
    const height = (bytes) => (this.most ? (bytes / this.most) * tall : 0);
    const tops = new Float64Array(stacks.columns);
    const plain = { ...inks, outline: null };
    for (const [i, category] of this.used.entries()) {
      const own = stacks.bytes.subarray(i * stacks.columns, (i + 1) * stacks.columns);
      for (let c = 0; c < stacks.columns; ) {
        let end = c + 1; // columns that are alike are one area
        while (end < stacks.columns && own[end] === own[c] && tops[end] === tops[c]) end += 1;
        const [low, high] = [height(tops[c]), height(tops[c] + own[c])];
        if (own[c]) this.brushes.area(context, category, this.left + c, tall + 6 - high, end - c, high - low, plain);
        c = end;
      }
      for (let c = 0; c < stacks.columns; c++) tops[c] += own[c];
    }
    context.fillStyle = inks.faint;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const [at, text] of ticksOf(0, this.most / unit_bytes, 3)) {
      const y = tall + 6 - height(at * unit_bytes);
      context.fillRect(this.left - 3, y - 0.5, 3, 1);
      context.fillText(`${text}${at ? ` ${unit}` : ""}`, this.left - 5, Math.max(y, 6));
    }
    this._axis(context, tall + 7, this.left, room, last, "steps taken, of all ranks", inks);
  }

  /** Of every pixel's steps, the one at which most memory lived: a peak of one step is not lost. */
  _stacks(rank, columns, last) {
    const { recording } = this.app;
    const { memory } = recording.tables;
    const step = memory.column("step");
    const size = memory.column("bytes");
    const [ranks, kinds] = [memory.column("rank"), memory.column("category")];
    const by_kind = new Map(this.used.map((category) => [category.id, []]));
    for (let i = 0; i < memory.n; i++) if (ranks[i] === rank) by_kind.get(kinds[i])?.push(i);
    const groups = [...by_kind.values()];
    const at = groups.map(() => 0);
    const bytes = new Float64Array(columns * groups.length);
    const own = recording.taken(rank);
    for (let c = 0; c < columns; c++) {
      const begin = Math.floor((c * (last + 1)) / columns);
      const end = Math.max(Math.floor(((c + 1) * (last + 1)) / columns), begin + 1);
      let best = -1;
      // A rank's memory changes as it steps, so only the steps after its own need a look.
      const moments = [begin];
      for (let i = countBelow(own, begin); i < own.length && own[i] + 1 < end; i++) moments.push(own[i] + 1);
      const found = groups.map(() => 0);
      for (const moment of moments) {
        const now = groups.map((rows, g) => {
          while (at[g] < rows.length && step[rows[at[g]]] <= moment) at[g] += 1;
          return at[g] ? size[rows[at[g] - 1]] : 0;
        });
        const total = now.reduce((sum, each) => sum + each, 0);
        if (total > best) {
          best = total;
          now.forEach((each, g) => (found[g] = each));
        }
      }
      found.forEach((each, g) => (bytes[g * columns + c] = each));
    }
    return { columns, bytes };
  }
}

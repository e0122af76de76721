// What is under way between ranks: messages of which one half is posted, and collectives to which not all have come.

import { FONT, bytesText, cutText, sized } from "./paint.js";
import { fill, make, mark, panel, write } from "./dom.js";
import { ranksText } from "./ranks.js";

const MOST_LISTED = 8;

function messageText(message) {
  const absent = message.posted === "send" ? message.dst : message.src;
  const name = message.name ? ` (${message.name})` : "";
  const size = `${bytesText(message.bytes)} ${message.dtype}`;
  return `message ${message.src} → ${message.dst} in ${message.group}${name}, ${size}: rank ${absent} has not posted its half`;
}

function collectiveText(collective) {
  const { what, bytes, come, waits_for } = collective;
  return `${what}, ${bytesText(bytes)}: ${ranksText(come)} came; waits for ${ranksText(waits_for)}`;
}

/** The kind in "dp.all_reduce number 3": "all_reduce". */
function kindOf(what) {
  const name = what.split(" number ")[0];
  return name.slice(name.lastIndexOf(".") + 1);
}

/** Ranks on a circle, with what is on its way between them. */
export class Flight {
  /** @param {object} app what is shown: recording, state, inks, selected, next_rank */
  constructor(app) {
    this.app = app;
    const { root, note } = panel("Between ranks", "flight");
    this.note = note;
    this.canvas = make("canvas", { role: "img", class: "plot" });
    this.plot = make("div", { class: "plotbox" }, this.canvas);
    this.list = make("ul", { class: "plain" });
    this.legend = make("ul", { class: "legend" });
    for (const [name, text] of [["solid", "sent, not received yet"], ["dashed", "awaited, not sent yet"], ["dot", "has come"], ["ring", "not yet come"]]) {
      this.legend.append(make("li", {}, make("span", { class: `sign-${name}`, "aria-hidden": "true" }), text));
    }
    root.append(this.plot, this.legend, this.list);
    this.root = root;
  }

  renew() {}

  draw() {
    const { state, inks, recording } = this.app;
    const width = Math.max(this.plot.clientWidth, 180);
    const n = recording.ranks.length;
    const height = n <= 2 ? 150 : Math.min(width * 0.62, n <= 8 ? 250 : 330);
    const context = sized(this.canvas, width, height);
    const room = (Math.PI * (Math.min(width / 2, height * 0.9) + height / 2)) / n; // of the circle, for each
    this.node = Math.max(Math.min(15, room * 0.4), 2.5);
    this.places = this._places(width, height);
    this.labels = [];
    for (const collective of together(state.collectives)) this._collective(context, collective, inks, width);
    for (const message of state.messages) this._message(context, message, inks);
    this._nodes(context, state, inks);
    this._labels(context, inks, width, height);
    const lines = [...state.messages.map(messageText), ...state.collectives.map(collectiveText)];
    const under_way = lines.length;
    if (under_way > MOST_LISTED) lines.splice(MOST_LISTED, Infinity, `and ${under_way - MOST_LISTED} more under way`);
    fill(this.list, lines.length, () => make("li"));
    lines.forEach((line, i) => write(this.list.children[i], line));
    write(this.note, under_way ? `${under_way} under way` : "nothing waits for anybody");
    mark(this.canvas, "aria-label", `Ranks on a circle. ${lines.join(". ") || "Nothing is under way."}`);
  }

  /** Ranks clockwise from the top; few of them on a line, where a circle would be one anyway. */
  _places(width, height) {
    const { ranks } = this.app.recording;
    const places = new Map();
    const [cx, cy] = (this.middle = [width / 2, height / 2]);
    const rx = Math.min(width / 2 - this.node - 24, height * 0.9);
    const ry = height / 2 - this.node - 8;
    ranks.forEach((rank, i) => {
      const angle = ranks.length <= 2 ? Math.PI * (1 - i) : (2 * Math.PI * i) / ranks.length - Math.PI / 2;
      places.set(rank, [cx + rx * Math.cos(angle), cy + ry * Math.sin(angle)]);
    });
    return places;
  }

  _nodes(context, state, inks) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const rank of state.ranks) {
      const [x, y] = this.places.get(rank.rank);
      const next = rank.state === "next";
      context.beginPath();
      context.arc(x, y, this.node, 0, 2 * Math.PI);
      context.fillStyle = rank.rank === this.app.selected ? inks.tint : inks.ground;
      context.fill();
      context.strokeStyle = next || rank.state === "failed" ? inks.cursor : inks.faint;
      context.lineWidth = next || rank.state === "failed" ? 2.6 : 1.2;
      context.setLineDash(rank.state === "waiting" ? [3, 2] : []);
      context.stroke();
      context.setLineDash([]);
      if (this.node < 7) continue; // a number would not fit
      context.fillStyle = inks.ink;
      context.font = `${next ? "bold " : ""}${Math.min(12, this.node + 1)}px ${FONT}`;
      context.fillText(String(rank.rank), x, y + 0.5);
    }
  }

  _message(context, message, inks) {
    const from = this.places.get(message.src);
    const to = this.places.get(message.dst);
    if (!from || !to) return;
    // Bent to its right, so that a message and its answer are two arrows.
    const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
    const length = Math.hypot(dx, dy) || 1;
    const bend = Math.min(length * 0.18, 34);
    const middle = [(from[0] + to[0]) / 2 - (dy / length) * bend, (from[1] + to[1]) / 2 + (dx / length) * bend];
    const shrink = (point, toward) => {
      const far = Math.hypot(toward[0] - point[0], toward[1] - point[1]) || 1;
      const by = (this.node + 3) / far;
      return [point[0] + (toward[0] - point[0]) * by, point[1] + (toward[1] - point[1]) * by];
    };
    const [start, tip] = [shrink(from, middle), shrink(to, middle)];
    context.strokeStyle = context.fillStyle = inks.ink;
    context.lineWidth = 1.6;
    context.setLineDash(message.posted === "send" ? [] : [5, 4]);
    context.beginPath();
    context.moveTo(...start);
    context.quadraticCurveTo(...middle, ...tip);
    context.stroke();
    context.setLineDash([]);
    arrowHead(context, middle, tip, 9);
    this.labels.push([bytesText(message.bytes), (start[0] + 2 * middle[0] + tip[0]) / 4, (start[1] + 2 * middle[1] + tip[1]) / 4]);
  }

  _collective(context, collective, inks, width) {
    const members = collective.members.filter((rank) => this.places.has(rank));
    if (!members.length) return;
    let [cx, cy] = [0, 0];
    for (const rank of members) {
      cx += this.places.get(rank)[0] / members.length;
      cy += this.places.get(rank)[1] / members.length;
    }
    // Neighbours meet near the rim: further in, there is room.
    [cx, cy] = [0.65 * cx + 0.35 * this.middle[0], 0.65 * cy + 0.35 * this.middle[1]];
    const kind = kindOf(collective.what.replace(/^\d+ of /, ""));
    const paint = this.app.recording.palette.find((each) => each.name === kind);
    const come = new Set(collective.come);
    for (const rank of members) {
      const [x, y] = this.places.get(rank);
      const far = Math.hypot(x - cx, y - cy) || 1;
      const [ex, ey] = [x + ((cx - x) * (this.node + 7)) / far, y + ((cy - y) * (this.node + 7)) / far];
      context.strokeStyle = come.has(rank) && paint ? paint.colour : inks.edge;
      context.lineWidth = come.has(rank) ? 3 : 1.2;
      context.setLineDash(come.has(rank) ? [] : [3, 4]);
      context.beginPath();
      context.moveTo(cx, cy);
      context.lineTo(ex, ey);
      context.stroke();
      context.setLineDash([]);
      context.beginPath();
      context.arc(ex, ey, Math.min(4, this.node), 0, 2 * Math.PI);
      context.fillStyle = come.has(rank) ? inks.ink : inks.ground;
      context.fill();
      context.strokeStyle = inks.ink;
      context.lineWidth = 1.2;
      context.stroke();
    }
    context.font = `11px ${FONT}`;
    this.labels.push([cutText(context, `${collective.what.split(" number ")[0]}, ${bytesText(collective.bytes)}`, width * 0.55), cx, cy]);
  }

  /** Writes what was gathered, beside where it belongs if something stands there. */
  _labels(context, inks, width, height) {
    context.font = `11px ${FONT}`;
    const taken = [...this.places.values()].map(([x, y]) => [x - this.node - 2, y - this.node - 2, x + this.node + 2, y + this.node + 2]);
    const [mx, my] = this.middle;
    for (const [text, cx, cy] of this.labels.slice(0, MOST_LISTED)) {
      const half = context.measureText(text).width / 2 + 4;
      const box = (x, y) => [Math.min(Math.max(x, half), width - half) - half, y - 9, Math.min(Math.max(x, half), width - half) + half, y + 9];
      const free = ([x0, y0, x1, y1]) => y0 >= 0 && y1 <= height && taken.every(([a, b, c, d]) => x1 <= a || x0 >= c || y1 <= b || y0 >= d);
      const tries = [0, 0.3, 0.6].flatMap((in_) => [0, 14, -14, 28, -28, 44, -44].map((off) => box(cx + in_ * (mx - cx), cy + in_ * (my - cy) + off)));
      const own = tries.find(free);
      if (!own) continue; // the list below has it
      taken.push(own);
      context.fillStyle = inks.ground;
      context.fillRect(own[0], own[1], 2 * half, 18);
      context.fillStyle = inks.ink;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(text, own[0] + half, own[1] + 9);
    }
  }
}

/** Collectives of the same members, to which the same ranks have come, as one. */
function together(collectives) {
  const found = new Map();
  for (const each of collectives) {
    const key = `${each.members} ${each.come} ${kindOf(each.what)}`;
    const other = found.get(key);
    if (!other) found.set(key, { ...each, count: 1 });
    else Object.assign(other, { count: other.count + 1, bytes: other.bytes + each.bytes });
  }
  return [...found.values()].map((each) => (each.count > 1 ? { ...each, what: `${each.count} of ${each.what.split(" number ")[0]}` } : each));
}

/** The head of an arrow that comes from a point and ends at another. */
export function arrowHead(context, from, tip, size) {
  const angle = Math.atan2(tip[1] - from[1], tip[0] - from[0]);
  context.beginPath();
  context.moveTo(tip[0], tip[1]);
  for (const side of [2.65, -2.65]) context.lineTo(tip[0] + size * Math.cos(angle + side), tip[1] + size * Math.sin(angle + side));
  context.closePath();
  context.fill();
}

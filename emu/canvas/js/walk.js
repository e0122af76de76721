// A collective hop by hop with its real values: a row for every member, a column for every chunk, and an arrow down a
// column for every chunk that moves. The strip under a cell's numbers says whose data are in it.

import { FONT, cutText, sized, timeText } from "./paint.js";
import { isWhole, numberText } from "./text.js";
import { foldable, grey, make, mark, write } from "./dom.js";
import { arrowHead } from "./flight.js";

const CELL = 46;
const HEAD = 20;
const GUTTER = 30; // beside every column, for its arrows
const GLIDE_MS = 260;

function along(x, dim, from, to) {
  return dim === 0 ? x.slice(from, to) : x.map((each) => along(each, dim - 1, from, to));
}

/**
 * The numbers of one chunk of a buffer, in a row.
 * @param {object} walk what `Walk.as_dict()` says
 * @param held nested numbers: what a member holds
 */
export function chunkOf(walk, held, chunk) {
  const from = walk.cuts.slice(0, chunk).reduce((sum, each) => sum + each, 0);
  const to = from + walk.cuts[chunk];
  if (Number.isInteger(walk.dim)) return along(held, walk.dim, from, to).flat(Infinity);
  return [held].flat(Infinity).slice(from, to);
}

/** Whose data are in each chunk of each member after some hops: rank -> one set of ranks for each chunk. */
export function sharesAfter(walk, hops) {
  const gathers = walk.what.endsWith("all_gather");
  const ranks = Object.keys(walk.given).map(Number);
  const shares = new Map(ranks.map((rank) => [rank, walk.cuts.map(() => new Set(gathers ? [] : [rank]))]));
  if (gathers) for (const rank of ranks) shares.get(rank)[ownChunk(walk, rank)]?.add(rank);
  for (const hop of walk.hops.slice(0, hops)) {
    const sent = hop.moves.map((move) => new Set(shares.get(move.src)?.[move.chunk]));
    hop.moves.forEach((move, i) => {
      const own = shares.get(move.dst);
      if (own) own[move.chunk] = move.does === "add" ? new Set([...own[move.chunk], ...sent[i]]) : sent[i];
    });
  }
  return shares;
}

/** The numbers that a member holds of a chunk after some hops; before the first, what it gives. */
export function numbersAfter(walk, hops, rank, chunk) {
  const gathers = walk.what.endsWith("all_gather");
  if (gathers && ownChunk(walk, rank) === chunk) return [walk.given[rank]].flat(Infinity);
  const reached = (hop) => hop.moves.some((move) => move.dst === rank && move.chunk === chunk);
  if (gathers && !walk.hops.slice(0, hops).some(reached)) return []; // zeros stand there that nobody has sent
  return chunkOf(walk, hops ? walk.hops[hops - 1].held[rank] : walk.given[rank], chunk);
}

/** Which chunk of the whole a member of an all_gather gives: it is the first that it sends. One alone gives all of it. */
function ownChunk(walk, rank) {
  return walk.hops.length ? walk.hops[0].moves.find((move) => move.src === rank)?.chunk : 0;
}

/** The walk's part of the page. */
export class WalkView {
  /** @param {object} app what is shown: inks, walkAt(algorithm) -> Promise of {walk, algorithms} or {error}, still */
  constructor(app) {
    this.app = app;
    this.hop = 0;
    this.fold = foldable("Collective, chunk by chunk", "walk", "c", () => app.draw());
    this.root = this.fold.root;
    this.select = make("select", { "aria-label": "algorithm", onchange: () => this._choose(this.select.value) });
    this.back = make("button", { type: "button", "aria-label": "hop back", title: "hop back: [", onclick: () => this.step(-1) }, "◀ hop");
    this.on = make("button", { type: "button", "aria-label": "next hop", title: "next hop: ]", onclick: () => this.step(1) }, "hop ▶");
    this.says = make("p", { class: "says", "aria-live": "polite" });
    this.canvas = make("canvas", { role: "img", class: "plot" });
    this.plot = make("div", { class: "plotbox wide", tabindex: "0", "aria-label": "members and chunks" }, this.canvas);
    this.legend = make("p", { class: "caption" }, "The strip under the numbers: whose data are in a chunk, one field for every member. "
      + "Thick frame: has just arrived (+ added, = copied); dashed frame: was sent.");
    const bar = make("div", { class: "row" }, this.back, this.on, make("label", {}, "algorithm ", this.select));
    this.fold.body.append(bar, this.says, this.plot, this.legend);
  }

  renew() {}

  /** Another hop; the first is how it begins. */
  step(by) {
    if (!this.fold.open) return this.fold.toggle(true);
    if (!this.walk) return undefined;
    const hop = Math.min(Math.max(this.hop + by, 0), this.walk.hops.length);
    const moves = hop !== this.hop;
    this.hop = hop;
    this._draw(moves && by > 0 && !this.app.still());
    return undefined;
  }

  _choose(algorithm) {
    this.algorithm = algorithm;
    this.hop = 0;
    this.app.draw();
  }

  /** Fetches what is walked at this step, and draws it. */
  async draw() {
    const asked = (this.asked = {});
    if (!this.fold.open) {
      write(this.fold.note, ""); // what it said may be so no more
      return;
    }
    const found = await this.app.walkAt(this.algorithm);
    if (asked !== this.asked) return; // the page has gone on meanwhile
    const walk = found.walk || null;
    if (walk !== this.walk) {
      const same = walk && this.walk && JSON.stringify(walk) === JSON.stringify(this.walk);
      if (!same) this.hop = 0;
    }
    this.walk = walk;
    this.plot.hidden = this.legend.hidden = !walk;
    const names = found.algorithms || [];
    this.select.replaceChildren(...names.map((name) => make("option", { value: name, selected: walk && name === walk.algorithm }, name)));
    this.select.disabled = names.length < 2;
    if (!walk) {
      write(this.fold.note, "");
      write(this.says, found.error ? `${found.error.message}${found.error.hint ? `: ${found.error.hint}` : ""}` : "");
      return;
    }
    write(this.fold.note, `the last that moved data: ${walk.what} by ${walk.algorithm}`);
    this._draw(false);
  }

  _draw(glides) {
    cancelAnimationFrame(this.frame);
    const began = performance.now();
    const draw = (now) => {
      const share = glides ? Math.min(Math.max((now - began) / GLIDE_MS, 0), 1) : 1;
      this._paint(share);
      if (share < 1) this.frame = requestAnimationFrame(draw);
    };
    draw(began);
    const { walk, hop } = this;
    const now = hop ? walk.hops[hop - 1] : null;
    const times = now && now.times_s ? ` (${timeText(now.times_s[0])} to ${timeText(now.times_s[1])} from when all are there)` : "";
    write(this.says, now ? `hop ${hop} of ${walk.hops.length}: ${now.says}${times}` : `before the first of ${walk.hops.length} hops: what everyone gives`);
    grey(this.back, hop === 0);
    grey(this.on, hop === walk.hops.length);
    const moves = now ? now.moves.map((each) => `rank ${each.src} sends chunk ${each.chunk} to rank ${each.dst}, to ${each.does}`) : [];
    mark(this.canvas, "aria-label", `${walk.what} by ${walk.algorithm}. ${moves.join("; ") || "nothing moves"}`);
  }


  _paint(share) {
    const { walk, hop } = this;
    const { inks } = this.app;
    const ranks = Object.keys(walk.given).map(Number);
    const chunks = walk.cuts.length;
    const left = 58;
    const column = Math.max((Math.max(this.plot.clientWidth, 200) - left) / chunks, 92);
    const context = sized(this.canvas, left + chunks * column, HEAD + ranks.length * CELL + 4);
    const moves = hop ? walk.hops[hop - 1].moves : [];
    const shares = sharesAfter(walk, hop);
    context.textBaseline = "middle";
    context.font = `11px ${FONT}`;
    context.fillStyle = inks.faint;
    context.textAlign = "center";
    for (let c = 0; c < chunks; c++) context.fillText(chunks > 1 ? `chunk ${c} (${walk.cuts[c]})` : `the whole (${walk.cuts[c]})`, left + c * column + (column - GUTTER) / 2, HEAD / 2);
    ranks.forEach((rank, r) => {
      const y = HEAD + r * CELL;
      context.fillStyle = inks.ink;
      context.font = `bold 11px ${FONT}`;
      context.textAlign = "left";
      context.fillText(`rank ${rank}`, 2, y + CELL / 2 - 2);
      for (let c = 0; c < chunks; c++) {
        const arrives = moves.find((move) => move.dst === rank && move.chunk === c);
        const sent = moves.some((move) => move.src === rank && move.chunk === c);
        const box = { x: left + c * column, y: y + 2, w: column - GUTTER, h: CELL - 7 };
        this._cell(context, inks, box, numbersAfter(walk, hop, rank, c), shares.get(rank)[c], ranks, arrives, sent);
      }
    });
    const row = new Map(ranks.map((rank, r) => [rank, HEAD + r * CELL + CELL / 2 - 2]));
    for (const move of moves) this._arrow(context, inks, left + move.chunk * column + column - GUTTER, row.get(move.src), row.get(move.dst), share);
  }

  _cell(context, inks, box, values, shares, ranks, arrives, sent) {
    const { x, y, w, h } = box;
    context.fillStyle = arrives ? inks.tint : inks.ground;
    context.fillRect(x, y, w, h);
    context.strokeStyle = arrives ? inks.ink : inks.edge;
    context.lineWidth = arrives ? 2.2 : 1;
    context.setLineDash(sent && !arrives ? [4, 3] : []);
    context.strokeRect(x, y, w, h);
    context.setLineDash([]);
    context.fillStyle = inks.ink;
    context.font = `11px ${FONT}`;
    context.textAlign = "left";
    const sign = arrives ? (arrives.does === "add" ? "+ " : "= ") : "";
    const whole = isWhole(this.walk.dtype);
    const text = values.length ? `${sign}${values.slice(0, 64).map((each) => numberText(each, whole)).join("  ")}` : "";
    const first = cutText(context, text, w - 10);
    const cut = first.endsWith("…") && first !== text ? first.slice(0, -1).lastIndexOf("  ") : -1;
    if (cut > 0) {
      context.fillText(text.slice(0, cut), x + 5, y + 10);
      context.fillText(cutText(context, text.slice(cut).trim(), w - 10), x + 5, y + 23);
    } else context.fillText(first, x + 5, y + (h - 6) / 2);
    const field = (w - 8) / ranks.length;
    ranks.forEach((rank, i) => {
      context.fillStyle = shares.has(rank) ? inks.ink : inks.line;
      context.fillRect(x + 4 + i * field, y + h - 8, Math.max(field - 1.5, 1), 5);
    });
  }

  _arrow(context, inks, x, from, to, share) {
    if (from === undefined || to === undefined) return;
    const far = Math.abs(to - from) / CELL;
    const bow = Math.min(12 + 5 * far, GUTTER + 6);
    // Apart where they leave and arrive, so that an arrow is not taken for the next one's.
    const [start, tip] = [from + Math.sign(to - from) * 6, to - Math.sign(to - from) * 6];
    context.strokeStyle = context.fillStyle = inks.cursor;
    context.lineWidth = 2;
    context.save();
    context.beginPath();
    const [top, tall] = [Math.min(start, tip) - 9, Math.abs(tip - start) + 18];
    context.rect(x - 2, to > from ? top : top + tall * (1 - share), GUTTER + 4, tall * share);
    context.clip();
    context.beginPath();
    context.moveTo(x + 1, start);
    context.bezierCurveTo(x + bow, start, x + bow, tip, x + 5, tip);
    context.stroke();
    arrowHead(context, [x + 12, tip], [x + 1, tip], 8);
    context.restore();
  }
}

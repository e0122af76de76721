// How every rank stands: a card each, with its line, what it did last and does next, its streams and what is under way.

import { bytesText, sampleRanks } from "./paint.js";
import { fill, grey, make, mark, panel, write } from "./dom.js";

const MOST_CARDS = 16;
// A sign tells states apart where colours do not.
const SIGNS = { next: "▶", ready: "○", waiting: "‖", ended: "■", failed: "✕", "not begun": "·" };

/** Ranks in few words, 8 of them at most: "rank 3", "ranks 1, 2". */
export function ranksText(ranks) {
  const shown = `rank${ranks.length === 1 ? "" : "s"} ${ranks.slice(0, 8).join(", ")}`;
  return ranks.length > 8 ? `${shown} and ${ranks.length - 8} more` : shown;
}

function doing(rank) {
  if (rank.state === "waiting") return `waits in ${rank.waits_in}`;
  if (rank.state === "failed" || rank.state === "ended" || rank.state === "not begun") return rank.state;
  if (!rank.next) return rank.state === "ready" ? "can go on" : "…";
  return rank.next.label;
}

function workText(work) {
  const waits = work.waits_for.length ? `waits for ${ranksText(work.waits_for)}` : "done, not waited for";
  return `${work.what}, ${bytesText(work.bytes)}, on ${work.stream}: ${waits}`;
}

/** The cards of the ranks. */
export class Ranks {
  /** @param {object} app what is shown: recording, state, selected, next_rank, select(rank), stepRank(rank) */
  constructor(app) {
    this.app = app;
    const { root, note } = panel("Ranks", "ranks");
    this.note = note;
    this.cards = make("div", { class: "cards", role: "group", "aria-label": "ranks" });
    root.append(this.cards);
    this.root = root;
  }

  renew() {}

  draw() {
    const { recording, state, selected, next_rank } = this.app;
    const ranks = sampleRanks(recording.ranks, MOST_CARDS, [selected, next_rank]);
    const shown = state.ranks.filter((each) => ranks.includes(each.rank));
    const hidden = ranks.length < recording.ranks.length;
    write(this.note, hidden ? `${ranks.length} of ${recording.ranks.length} shown; up and down select others` : "");
    const cards = fill(this.cards, shown.length, () => this._card());
    shown.forEach((rank, i) => this._write(cards[i], rank, rank.rank === selected));
  }

  _card() {
    const part = (name, tag = "div") => make(tag, { class: name });
    const step = make("button", { class: "small", type: "button", title: "let this rank take its next step" }, "step");
    const head = make("div", { class: "cardhead" }, part("sign", "span"), part("who", "span"), part("state", "span"), step);
    const moves = make("div", { class: "moves" }, part("last", "span"), part("arrow", "span"), part("next", "span"));
    const card = make("div", { class: "card", tabindex: "-1" }, head, part("line"), moves, part("streams"), part("works", "ul"));
    card.addEventListener("click", () => this.app.select(Number(card.dataset.rank)));
    step.addEventListener("click", (event) => {
      event.stopPropagation();
      this.app.travel.stepRank(Number(card.dataset.rank));
    });
    return card;
  }

  _write(card, rank, selected) {
    const at = (name) => card.querySelector(`.${name}`);
    card.dataset.rank = rank.rank;
    mark(card, "data-state", rank.state);
    mark(card, "data-selected", selected ? "yes" : null);
    const coords = Object.entries(rank.coords).map(([axis, i]) => `${axis} ${i}`).join(", ");
    write(at("sign"), SIGNS[rank.state] || "");
    write(at("who"), `rank ${rank.rank}`);
    write(at("state"), `${rank.state}${coords ? ` (${coords})` : ""}`);
    const steps = `${rank.steps} step${rank.steps === 1 ? "" : "s"} taken`;
    write(at("line"), [rank.line, rank.mark && `after ${rank.mark}`, steps].filter(Boolean).join(", "));
    write(at("last"), rank.last ? rank.last.label : "");
    write(at("arrow"), rank.last ? " → " : "");
    write(at("next"), doing(rank));
    write(at("streams"), rank.streams.map((each) => `${each.name}: ${each.last} (${each.given})`).join("; "));
    const most = 3;
    const lines = rank.works.slice(0, most).map(workText);
    if (rank.works.length > most) lines.push(`and ${rank.works.length - most} more under way`);
    fill(at("works"), lines.length, () => make("li"));
    lines.forEach((line, i) => write(at("works").children[i], line));
    const button = card.querySelector("button");
    mark(button, "aria-label", `let rank ${rank.rank} take its next step`);
    mark(card, "aria-label", `rank ${rank.rank}, ${rank.state}`);
    grey(button, this.app.state.ended || rank.state === "ended");
  }
}

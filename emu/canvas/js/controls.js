// What stands above the panels: where the program stands, in words, and buttons for all that keys do.

import { KEYS } from "./keys.js";
import { grey, make, write } from "./dom.js";
import { timeText } from "./paint.js";

function button(app, command, sign, label, key = "") {
  const title = key ? `${label}: ${key}` : label;
  return make("button", { type: "button", title, "aria-label": label, onclick: () => app.command(command) }, sign);
}

/** Where a program stands, in words: [which step, what is next]. */
export function sentence(recording, state) {
  const { index, error, op } = state;
  const of = recording.ended ? `${recording.known}` : `${recording.known} known so far`;
  const where = `Step ${index} of ${of}.`;
  if (error) return [where, `Ended by ${error.kind}: ${error.message}`];
  if (!op) return [where, "The program has ended."];
  const inside = [op.scope, op.phase].filter(Boolean).join(", ");
  const words = [`Next: rank ${op.rank}`, op.label, op.detail, inside && `(${inside})`, op.line && `at ${op.line}`];
  return [where, `${words.filter(Boolean).join(" ")}.`];
}

/** The controls, and the line of words that is read out at every step. */
export class Controls {
  /** @param {object} app command(name), goto(index), until(what), recording, state, busy, live */
  constructor(app) {
    this.app = app;
    const { about } = app.recording;
    const mesh = Object.entries(about.mesh).map(([axis, size]) => `${axis} ${size}`).join(", ");
    this.heading = make("h2", { hidden: app.source.titled }, about.title || "stepper");
    this.about = make("span", { class: "note" });
    this.mesh = mesh;
    this.where = make("span", { class: "where" });
    this.what = make("span", { class: "what" });
    this.code = make("code", { class: "code" });
    this.busy = make("span", { class: "busy" });
    this.status = make("p", { class: "status", "aria-live": "polite", "aria-atomic": "true" }, this.where, " ", this.what, " ", this.code, " ", this.busy);
    this.alert = make("div", { class: "alert", role: "alert", hidden: true });
    this.slider = make("input", { type: "range", min: "0", step: "1", "aria-label": "step", oninput: () => app.travel.goto(this.slider.valueAsNumber) });
    this.number = make("input", { type: "number", min: "0", step: "1", "aria-label": "go to step", title: "go to step: g" });
    this.until = make("input", { type: "text", size: "28", placeholder: "all_reduce, backward, blocks.0…", "aria-label": "go on until",
      title: "an op, a kind of collective, group.kind, a name, a module, a phase, a mark, rank 2; * for any letters: u" });
    this.number.addEventListener("change", () => this._jump());
    this.number.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this._jump();
      if (event.key === "Escape") this._settle(); // so that leaving it is no jump
    });
    this.number.addEventListener("blur", () => this._settle());
    this.until.addEventListener("keydown", (event) => event.key === "Enter" && app.travel.until(this.until.value.trim()));
    this.help = make("div", { class: "help", hidden: true, role: "dialog", "aria-label": "keys" }, helpTable());
    this.first = [button(app, "first", "|◀", "to the beginning", "Home"), button(app, "back10", "−10", "ten steps back", "Shift ←"), button(app, "back", "◀ back", "one step back", "← or b")];
    this.on = [button(app, "next", "next ▶", "one step on", "→ or n"), button(app, "next10", "+10", "ten steps on", "Shift →"), button(app, "end", "▶|", "to the end", "End")];
    const group = (label, ...parts) => make("div", { class: "group", role: "group", "aria-label": label }, ...parts);
    this.root = make("div", {},
      make("div", { class: "row" }, this.heading, this.about),
      this.status,
      this.alert,
      make("div", { class: "row controls", role: "toolbar", "aria-label": "steps" },
        group("back", ...this.first),
        group("on", ...this.on),
        group("until", this.until, make("button", { type: "button", onclick: () => app.travel.until(this.until.value.trim()) }, "until")),
        group("zoom", button(app, "zoomIn", "+", "zoom in", "+"), button(app, "zoomOut", "−", "zoom out", "−"), button(app, "zoomAll", "all", "show all of the timeline", "0")),
        button(app, "help", "? keys", "what keys do", "?"),
      ),
      make("div", { class: "slider" }, this.slider, this.number),
      this.help,
    );
  }

  async _jump() {
    const { value } = this.number;
    const index = Math.max(Math.trunc(this.number.valueAsNumber), 0);
    if (this.jumps === index) return; // Enter is a change too
    if (Number.isFinite(index) && index !== this.app.index) {
      this.jumps = index;
      await this.app.travel.goto(index);
      this.jumps = null;
    }
    if (this.number.value === value) this._settle();
  }

  /** The field says where the program stands, whatever was written there. */
  _settle() {
    this.number.value = String(this.app.index);
  }

  /** Says what is wrong and what to do; null takes it away. */
  say(error) {
    this.alert.hidden = !error;
    write(this.alert, error ? [error.message, error.hint].filter(Boolean).join(" — ") : "");
  }

  draw() {
    const { recording, state, index, live } = this.app;
    const { about } = recording;
    const [where, what] = sentence(recording, state);
    write(this.where, where);
    write(this.what, what);
    write(this.code, state.error ? "" : (state.op?.code ?? ""));
    write(this.busy, this.app.travel.busy ? "Running …" : "");
    const times = recording.step_time_s === null ? "" : `, ${timeText(recording.step_time_s)}${recording.provisional ? " so far, provisional" : ""}`;
    write(this.about, `${this.mesh} on ${about.cluster}${times}${about.kind === "run" ? "; a saved run" : ""}${this.app.closed ? "; closed" : ""}`);
    this.slider.max = String(recording.last);
    this.slider.value = String(index);
    this.slider.setAttribute("aria-valuetext", `step ${index} of ${recording.known}`);
    if (this.number.getRootNode().activeElement !== this.number) this.number.value = String(index);
    this.number.max = live && !recording.ended ? "" : String(recording.last);
    const done = index >= recording.last && (recording.ended || !live);
    for (const each of this.first) grey(each, index === 0);
    for (const each of this.on) grey(each, done);
  }
}

function helpTable() {
  const rows = KEYS.filter(([, , keys]) => keys).map(([, , keys, words]) => make("tr", {}, make("td", {}, keys), make("td", {}, words)));
  return make("table", {}, make("tbody", {}, ...rows));
}

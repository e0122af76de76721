// What a page asks for beside the steps: tensors and walks, out of the record or of the program that is alive.

import { tensorsOf } from "./tensors.js";

const CALM_MS = 120; // a program that is alive is asked once the page stands still

const CLOSED = { error: { message: "the stepper was closed, and what it held is gone", hint: "make another: emu.step(program, mesh)" } };

/** Answers for the panels, of the step and rank that are shown. Answers are kept: a step does not change. */
export class Answers {
  /** @param {object} app recording, index, selected, live, ask(question) */
  constructor(app) {
    this.app = app;
    this.kept = new Map();
  }

  /** Another rank went first: what was known of steps is not so. */
  forget() {
    this.kept.clear();
  }

  /** One question for each step and rank, however often it is drawn. */
  _ask(key, question) {
    if (!this.kept.has(key)) {
      const asked = this._asked(question);
      this.kept.set(key, asked);
      const forget = () => this.kept.get(key) === asked && this.kept.delete(key);
      asked.then((answer) => (answer.error || answer.passed) && forget(), forget);
    }
    return this.kept.get(key);
  }

  async _asked(question) {
    const { app } = this;
    const at = [app.index, app.selected];
    await new Promise((resolve) => setTimeout(resolve, CALM_MS));
    if (app.gone || at[0] !== app.index || at[1] !== app.selected) return { passed: true };
    return app.travel.ask(question);
  }

  /** The last collective that moved data: {walk, algorithms} or {error}. */
  async walk(algorithm) {
    const { recording, index, live } = this.app;
    if (live) {
      const ask = (name) => this._ask(`walk ${index} ${name}`, { walk: name ? { step: index, algorithm: name } : { step: index } });
      const answer = await ask(algorithm);
      return answer.error && algorithm ? ask(null) : answer; // this one has no such algorithm
    }
    if (this.app.closed) return CLOSED;
    let at = -1;
    for (const key of Object.keys(recording.walks)) if (Number(key) <= index && Number(key) > at) at = Number(key);
    const walks = at < 0 ? null : recording.walks[at];
    if (!walks) return { error: { message: `no collective has moved data before step ${index}`, hint: "go on to one, e.g. until all_reduce, and one step further" } };
    const algorithms = Object.keys(walks);
    if (!algorithms.length) return { error: { message: "the numbers of this collective are not in this file", hint: recording.notes.join("; ") } };
    return { walk: walks[algorithm] || walks[algorithms[0]], algorithms };
  }

  /** The tensors of the selected rank: {tensors} or {error}. */
  async tensors() {
    const { recording, index, selected, live } = this.app;
    if (live) return this._ask(`tensors ${index} ${selected}`, { tensors: { step: index, rank: selected } });
    if (this.app.closed) return CLOSED;
    const tensors = tensorsOf(recording, selected, index);
    return tensors ? { tensors } : { error: { message: "no tensors are in this file", hint: recording.notes.join("; ") } };
  }

  /** The numbers of one of them: {value, note} or {error}. */
  async value(tensor) {
    const { index, selected, live } = this.app;
    if (this.app.closed) return CLOSED;
    if (!live) return { error: { message: "its numbers are not in this file", hint: "" } };
    const answer = await this._ask(`value ${index} ${selected} ${tensor.name}`, { tensor: { step: index, rank: selected, name: tensor.name } });
    if (answer.error || !answer.tensor) return answer.error ? answer : { error: { message: "no answer yet", hint: "" } };
    const { value, note } = answer.tensor;
    return value === null ? { error: { message: note, hint: "" } } : { value, note };
  }
}

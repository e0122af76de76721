// Going on and back. What is known is shown at once; what is not known yet is asked of the program, one move after the
// other, and while it runs the moves that come wait.

import { Recording } from "./record.js";
import { shownAt } from "./moment.js";
import { findGoal, hintFor } from "./goals.js";
import { mark } from "./dom.js";

const SPANS_MS = 150; // how long a live page stands still before it asks for times
const TELL_MS = 40; // and before it says at which of the known steps it stands
const MOST_WAITING = 20; // moves that wait for a program; a key that is held asks for more

/** Moves the page through the steps. */
export class Travel {
  /** @param {object} app recording, index, live, source, controls, renew(what), draw(), later(name, ms, then) */
  constructor(app) {
    this.app = app;
    this.tail = Promise.resolve();
    this.waiting = this.asking = 0;
    this.grown = false; // rows have come that are not shown yet
    if (app.live) this._price_later();
  }

  /** Whether a program runs for a move. */
  get busy() {
    return this.asking > 0 && this.waiting > 0;
  }

  /** Whether the program can go on beyond what is known. */
  get goes_on() {
    return this.app.live && !this.app.recording.ended;
  }

  goto(index) {
    return this._move(() => this._goto(index));
  }

  next(n = 1) {
    return this._move(() => this._goto(this.app.index + n));
  }

  back(n = 1) {
    return this._move(() => this._goto(Math.max(this.app.index - n, 0)));
  }

  end() {
    return this._move(async () => {
      const { last } = this.app.recording;
      if (this.goes_on) await this._from(last, { do: "end" });
      else this._show(last);
    });
  }

  /** To the next step that is called so; a program that is alive goes on to it. */
  until(what) {
    return this._move(async () => {
      const { recording, index, controls } = this.app;
      const found = what ? findGoal(recording, what, index) : -1;
      if (!what) controls.say({ message: "until names nothing to go on to", hint: "write a name, e.g. all_reduce, backward, rank 1" });
      else if (found >= 0) this._show(found);
      else if (this.goes_on) await this._from(recording.last, { do: "until", what: /^\d+$/.test(what) ? `rank ${what}` : what });
      else controls.say({ message: `there is no "${what}" after step ${index}`, hint: hintFor(recording, what, index) });
    });
  }

  /** One rank takes its next step. A program that is alive lets it go first; a record says when it did. */
  stepRank(rank = this.app.selected) {
    return this._move(async () => {
      const { recording, index, live, controls } = this.app;
      const at = recording.taken(rank).find((step) => step >= index);
      if (live && at !== index) await this._from(index, { do: "next", n: 1, rank });
      else if (at === undefined) controls.say({ message: `rank ${rank} takes no step after this one`, hint: "step back to look again" });
      else await this._goto(at + 1);
    });
  }

  /** One move after the other. What needs no program is done before this returns. */
  _move(move) {
    if (this.waiting >= MOST_WAITING) return this.tail;
    this.waiting += 1;
    const run = async () => {
      try {
        await move();
      } catch (error) {
        this.app.controls.say({ message: String(error.message || error), hint: "" });
      }
      this.waiting -= 1;
      if (this.grown) this._draw();
      if (!this.app.gone) this.app.controls.draw();
    };
    this.tail = this.waiting === 1 ? run() : this.tail.then(run);
    return this.tail;
  }

  _draw() {
    if (this.grown) this.app.renew("rows");
    else this.app.draw();
    this.grown = false;
  }

  _show(index, tells = true) {
    const { app } = this;
    if (app.gone) return;
    const began = performance.now();
    app.index = Math.max(Math.min(index, app.recording.last), 0);
    app.controls.say(null);
    app.state = shownAt(app.recording, app.index);
    app.timeline.follow();
    this._draw();
    app.timings.last_step_ms = performance.now() - began;
    if (tells && app.live) app.later("tell", TELL_MS, () => app.source.setIndex?.(app.index));
  }

  async _goto(index) {
    if (index > this.app.recording.last && this.goes_on) await this._advance({ do: "goto", index });
    else this._show(index);
  }

  async _from(index, question) {
    await this.ask({ do: "goto", index });
    await this._advance(question);
  }

  /** Lets the program go on. It may end, or fail: the page then stands at its end. */
  async _advance(question) {
    const answer = await this.ask(question);
    const { app } = this;
    if (typeof answer.index === "number") this._show(answer.index, false);
    const beyond = question.do === "goto" && app.recording.ended && question.index > app.recording.last;
    if (beyond) this._show(app.recording.last);
    else if (answer.error && !app.state.error) app.controls.say(answer.error);
    this._price_later();
  }

  /** Asks the program; the page says that it runs. */
  async ask(question) {
    const { app } = this;
    if (question.do) clearTimeout(app.timers.tell); // it is told where to go on from
    this.asking += 1;
    mark(app.root, "aria-busy", "true");
    app.controls.draw();
    try {
      const answer = await app.source.ask(question);
      this.hear({ ...answer, index: undefined });
      return answer;
    } finally {
      this.asking -= 1;
      mark(app.root, "aria-busy", this.asking ? "true" : null);
      if (!app.gone) app.controls.draw();
    }
  }

  _price_later() {
    this.app.later("spans", SPANS_MS, async () => {
      if (this.app.live && !this.app.gone && !this.waiting) await this.ask({ spans: true });
    });
  }

  /** What a program says, asked or not: more rows, times, where it stands, that it is closed. */
  hear(news) {
    const { app } = this;
    if (app.gone) return;
    if (news.record) {
      app.recording = new Recording(news.record);
      app.answers.forget();
      app.renew();
    }
    if (news.part) {
      app.recording.add(news.part);
      this.grown = true;
      if (!this.waiting) {
        this._draw();
        this._price_later();
      }
    }
    if (news.spans && news.spans.spans) {
      app.recording.setSpans(news.spans);
      app.renew();
    }
    if (news.closed) {
      app.live = false;
      app.closed = true;
      app.controls.say(news.closed);
      app.draw();
    }
    if (typeof news.index === "number" && news.index !== app.index && !this.waiting) this._show(news.index, false);
  }
}

// The page: one record, one step of it that is shown, and the panels that show it. Everything known is shown at once; what
// is not known yet is asked of the program, one question after the other.

import { Recording } from "./record.js";
import { shownAt } from "./moment.js";
import { findGoal, namesNear } from "./goals.js";
import { Undo, make, mark } from "./dom.js";
import { commandOf } from "./keys.js";
import { inksOf } from "./paint.js";
import { STYLE } from "./style.js";
import { Controls } from "./controls.js";
import { Timeline } from "./timeline.js";
import { Memory } from "./memory.js";
import { Ranks } from "./ranks.js";
import { Flight } from "./flight.js";
import { WalkView } from "./walk.js";
import { Tensors } from "./tensors.js";
import { Answers } from "./source.js";
import { isDark, watchLooks } from "./looks.js";

const SPANS_MS = 150; // how long a live page stands still before it asks for times
const TELL_MS = 40; // and before it says at which of the known steps it stands
const MOST_WAITING = 20; // moves that wait for a program; a key that is held asks for more

class App {
  constructor(element, source) {
    const began = performance.now();
    this.source = source;
    this.live = Boolean(source.live);
    this.recording = new Recording(source.record);
    this.index = Math.min(source.index ?? source.record.at ?? 0, this.recording.last);
    [this.selected] = this.recording.ranks;
    this.timings = { first_draw_ms: 0, last_step_ms: 0 };
    this.undo = new Undo();
    this.timers = {};
    this.tail = Promise.resolve();
    this.waiting = this.asking = 0;
    this.answers = new Answers(this);
    this.inks = inksOf(isDark());
    // JupyterLab has keys of its own, and leaves those alone that are typed inside of such an element.
    this.host = make("div", { "data-lm-suppress-shortcuts": "true" });
    this.root = make("div", { class: "emu", tabindex: "0", role: "group", "aria-label": `stepper of ${source.record.title || "a program"}` });
    this.host.attachShadow({ mode: "open" }).append(make("style", {}, STYLE), this.root);
    this._build();
    element.append(this.host);
    this._listen();
    this.renew();
    this.timings.first_draw_ms = performance.now() - began;
    if (this.live) this._later("spans", SPANS_MS, () => this._price());
  }

  get next_rank() {
    return this.state.op ? this.state.op.rank : null;
  }

  get busy() {
    return this.asking > 0;
  }

  _build() {
    this.state = shownAt(this.recording, this.index);
    this.controls = new Controls(this);
    this.timeline = new Timeline(this);
    this.memory = new Memory(this);
    this.ranks = new Ranks(this);
    this.flight = new Flight(this);
    this.walk = new WalkView(this);
    this.tensors = new Tensors(this);
    this.panels = [this.timeline, this.memory, this.flight, this.ranks, this.walk, this.tensors];
    const columns = make("div", { class: "columns" }, this.memory.root, this.flight.root);
    this.notes = make("ul", { class: "plain note", "aria-label": "notes" });
    const parts = [this.timeline.root, columns, this.ranks.root, this.walk.root, this.tensors.root, this.notes];
    this.root.append(this.controls.root, ...parts);
  }

  _listen() {
    this.undo.on(this.root, "keydown", (event) => {
      const command = commandOf(event);
      if (command === null || this.command(command) === false) return;
      event.preventDefault();
      event.stopPropagation();
    });
    watchLooks(this.undo, (dark) => {
      this.inks = inksOf(dark);
      this.renew();
    });
    const observer = new ResizeObserver(() => this._later("resize", 30, () => this.draw()));
    observer.observe(this.root);
    this.undo.add(() => observer.disconnect());
    const unheard = this.source.listen?.((news) => this._hear(news));
    if (typeof unheard === "function") this.undo.add(unheard);
  }

  _later(name, delay_ms, then) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(then, delay_ms);
  }

  /** Everything anew: other rows, other colours. */
  renew() {
    mark(this.root, "data-theme", this.inks.dark ? "dark" : "light");
    this.notes.replaceChildren(...this.recording.notes.map((note) => make("li", {}, note)));
    for (const panel of this.panels) panel.renew();
    this.draw();
  }

  /** What is shown at this step. */
  draw() {
    if (this.gone) return;
    this.index = Math.min(this.index, this.recording.last);
    this.state = shownAt(this.recording, this.index);
    this.controls.draw();
    this.drawn = Promise.all(this.panels.map((panel) => panel.draw()));
  }

  // Going on and back.

  /** One move after the other: what is known is shown at once, and while a program runs moves wait. */
  _move(move) {
    if (this.waiting >= MOST_WAITING) return this.tail;
    this.waiting += 1;
    const run = async () => {
      try {
        await move();
      } catch (error) {
        this.controls.say({ message: String(error.message || error), hint: "" });
      }
      this.waiting -= 1;
    };
    this.tail = this.waiting === 1 ? run() : this.tail.then(run);
    return this.tail;
  }

  _show(index, tells = true) {
    const began = performance.now();
    this.index = Math.max(Math.min(index, this.recording.last), 0);
    this.controls.say(null);
    this.timeline.follow();
    this.draw();
    this.timings.last_step_ms = performance.now() - began;
    if (tells && this.live) this._later("tell", TELL_MS, () => this.source.setIndex?.(this.index));
  }

  goto(index) {
    return this._move(() => this._goto(index));
  }

  async _goto(index) {
    if (index > this.recording.last && this.live && !this.recording.ended) await this._advance({ do: "goto", index });
    else this._show(index);
  }

  next(n = 1) {
    return this._move(() => this._goto(this.index + n));
  }

  back(n = 1) {
    return this._move(() => this._goto(Math.max(this.index - n, 0)));
  }

  end() {
    return this._move(async () => {
      if (this.live && !this.recording.ended) await this._from(this.recording.last, { do: "end" });
      else this._show(this.recording.last);
    });
  }

  until(what) {
    return this._move(async () => {
      const found = what ? findGoal(this.recording, what, this.index) : -1;
      if (found >= 0) this._show(found);
      else if (!what) this.controls.say({ message: "until names nothing to go on to", hint: "write a name, e.g. all_reduce, backward, rank 1" });
      else if (this.live && !this.recording.ended) await this._from(this.recording.last, { do: "until", what: /^\d+$/.test(what) ? `rank ${what}` : what });
      else {
        const near = namesNear(this.recording, what).join(", ");
        this.controls.say({ message: `there is no ${what} after step ${this.index}`, hint: `step back to look again; near it are ${near}` });
      }
    });
  }

  /** One rank takes its next step. A program that is alive lets it go first; a record says when it did. */
  stepRank(rank = this.selected) {
    return this._move(async () => {
      const at = this.recording.taken(rank).find((step) => step >= this.index);
      if (this.live && at !== this.index) await this._from(this.index, { do: "next", n: 1, rank });
      else if (at === undefined) this.controls.say({ message: `rank ${rank} takes no step after this one`, hint: "step back to look again" });
      else await this._goto(at + 1);
    });
  }

  async _from(index, question) {
    await this.ask({ do: "goto", index });
    await this._advance(question);
  }

  /** Lets the program go on. It may end, or fail: the page then stands at its end. */
  async _advance(question) {
    const answer = await this.ask(question);
    const { recording } = this;
    if (typeof answer.index === "number") this._show(answer.index, false);
    const beyond = question.do === "goto" && recording.ended && question.index > recording.last;
    if (beyond) this._show(recording.last);
    else if (answer.error && !this.state.error) this.controls.say(answer.error);
    this._later("spans", SPANS_MS, () => this._price());
  }

  /** Asks the program; the page says that it runs. */
  async ask(question) {
    clearTimeout(this.timers.tell);
    this.asking += 1;
    mark(this.root, "aria-busy", "true");
    this.controls.draw();
    try {
      const answer = await this.source.ask(question);
      this._hear({ ...answer, index: undefined });
      return answer;
    } finally {
      this.asking -= 1;
      mark(this.root, "aria-busy", this.asking ? "true" : null);
      if (!this.gone) this.controls.draw();
    }
  }

  async _price() {
    if (this.gone || !this.live || this.waiting) return;
    await this.ask({ spans: true });
  }

  /** What a program says, asked or not: more rows, times, where it stands, that it is closed. */
  _hear(news) {
    if (this.gone) return;
    if (news.record) {
      this.recording = new Recording(news.record);
      this.answers.forget();
    }
    if (news.part) this.recording.add(news.part);
    if (news.spans && news.spans.spans) this.recording.setSpans(news.spans);
    if (news.closed) {
      this.live = false;
      this.controls.say(news.closed);
    }
    if (news.record || news.part || news.spans) {
      this.renew();
      if (news.part && !this.waiting) this._later("spans", SPANS_MS, () => this._price());
    }
    if (typeof news.index === "number" && news.index !== this.index && !this.waiting) this._show(news.index, false);
  }

  // What keys and buttons do.

  select(rank) {
    this.selected = rank;
    this.timeline.reveal(rank);
    this.draw();
  }

  _selectBy(by) {
    const { ranks } = this.recording;
    const i = ranks.indexOf(this.selected) + by;
    this.select(ranks[Math.min(Math.max(i, 0), ranks.length - 1)]);
  }

  _focus(field) {
    field.focus();
    field.select?.();
  }

  _escape() {
    const { help } = this.controls;
    if (help.hidden && this.host.shadowRoot.activeElement === this.root) return false;
    help.hidden = true;
    this.root.focus();
    return true;
  }

  /** Does what a key or button is for; false where there was nothing to do. */
  command(name) {
    const commands = {
      next: () => this.next(),
      back: () => this.back(),
      next10: () => this.next(10),
      back10: () => this.back(10),
      first: () => this.goto(0),
      end: () => this.end(),
      stepRank: () => this.stepRank(),
      jump: () => this._focus(this.controls.number),
      until: () => this._focus(this.controls.until),
      rankUp: () => this._selectBy(-1),
      rankDown: () => this._selectBy(1),
      collective: () => this.walk.fold.toggle(),
      hopBack: () => this.walk.step(-1),
      hopOn: () => this.walk.step(1),
      tensors: () => this.tensors.fold.toggle(),
      zoomIn: () => this.timeline.zoom(1.6),
      zoomOut: () => this.timeline.zoom(1 / 1.6),
      zoomAll: () => this.timeline.zoom(0),
      panBack: () => this.timeline.pan(-0.25),
      panOn: () => this.timeline.pan(0.25),
      help: () => (this.controls.help.hidden = !this.controls.help.hidden),
      escape: () => this._escape(),
    };
    return name === "escape" ? commands.escape() : (commands[name](), true);
  }

  walkAt(algorithm) {
    return this.answers.walk(algorithm);
  }

  tensorsAt() {
    return this.answers.tensors();
  }

  valueOf(tensor) {
    return this.answers.value(tensor);
  }

  /** Whether nothing should glide. */
  still() {
    return matchMedia("(prefers-reduced-motion: reduce)").matches;
  }

  destroy() {
    this.gone = true;
    Object.values(this.timers).forEach(clearTimeout);
    for (const panel of this.panels) panel.undo?.all();
    cancelAnimationFrame(this.walk.frame);
    this.undo.all();
    this.host.remove();
  }
}

/**
 * Shows a record in an element.
 * @param {HTMLElement} element gets one child, with a shadow root
 * @param {object} source record; and of a program that is alive: live, index, ask(question) -> Promise, listen(callback), setIndex(index)
 * @returns {object} goto, next, back, until, end, stepRank (promises: until they are done), index, known, shown(index), select(rank),
 *   selected, message, timings in milliseconds, idle() (a promise: until nothing is under way), destroy()
 */
export function mount(element, source) {
  const app = new App(element, source);
  const idle = async () => {
    await app.tail;
    await app.drawn;
  };
  return {
    goto: (index) => app.goto(index),
    next: (n) => app.next(n),
    back: (n) => app.back(n),
    until: (what) => app.until(String(what)),
    end: () => app.end(),
    stepRank: (rank) => app.stepRank(rank),
    select: (rank) => app.select(rank),
    shown: (index = app.index) => shownAt(app.recording, index),
    get index() {
      return app.index;
    },
    get known() {
      return app.recording.known;
    },
    get selected() {
      return app.selected;
    },
    get message() {
      return app.controls.alert.textContent;
    },
    timings: app.timings,
    idle,
    destroy: () => app.destroy(),
  };
}

// The page: one record, one step of it that is shown, and the panels that show it. Everything known is shown at once; what
// is not known yet is asked of the program, one question after the other.

import { Recording } from "./record.js";
import { shownAt } from "./moment.js";
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
import { Travel } from "./travel.js";

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
    this.answers = new Answers(this);
    this.inks = inksOf(isDark());
    // JupyterLab has keys of its own, and leaves those alone that are typed inside of such an element.
    this.host = make("div", { "data-lm-suppress-shortcuts": "true" });
    this.root = make("div", { class: "emu", tabindex: "0", role: "group", "aria-label": `stepper of ${source.record.title || "a program"}` });
    this.host.attachShadow({ mode: "open" }).append(make("style", {}, STYLE), this.root);
    this.travel = new Travel(this);
    this._build();
    element.append(this.host);
    this._listen();
    this.renew();
    this.timings.first_draw_ms = performance.now() - began;
  }

  get next_rank() {
    return this.state.op ? this.state.op.rank : null;
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
    const observer = new ResizeObserver(() => this.later("resize", 30, () => this.draw()));
    observer.observe(this.root);
    this.undo.add(() => observer.disconnect());
    const unheard = this.source.listen?.((news) => this.travel.hear(news));
    if (typeof unheard === "function") this.undo.add(unheard);
  }

  /** Does something once nothing of its name has come for a while. */
  later(name, delay_ms, then) {
    clearTimeout(this.timers[name]);
    this.timers[name] = setTimeout(then, delay_ms);
  }

  /** Everything anew; or only what depends on how many "rows" there are. */
  renew(what = "all") {
    mark(this.root, "data-theme", this.inks.dark ? "dark" : "light");
    this.notes.replaceChildren(...this.recording.notes.map((note) => make("li", {}, `Note: ${note}`)));
    for (const panel of this.panels) panel.renew(what);
    if (!this.drawn) this.timeline.follow(); // at first
    this.draw();
  }

  /** What is shown at this step. */
  draw() {
    if (this.gone) return;
    this.index = Math.min(this.index, this.recording.last);
    if (this.state.index !== this.index || this.state.known !== this.recording.known) this.state = shownAt(this.recording, this.index);
    this.controls.draw();
    this.drawn = Promise.all(this.panels.map((panel) => panel.draw()));
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
      next: () => this.travel.next(),
      back: () => this.travel.back(),
      next10: () => this.travel.next(10),
      back10: () => this.travel.back(10),
      first: () => this.travel.goto(0),
      end: () => this.travel.end(),
      stepRank: () => this.travel.stepRank(),
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
      help: () => {
        const { help } = this.controls;
        help.hidden = !help.hidden;
        if (!help.hidden) help.scrollIntoView({ block: "nearest" });
      },
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
    await app.travel.tail;
    await app.drawn;
  };
  return {
    goto: (index) => app.travel.goto(index),
    next: (n) => app.travel.next(n),
    back: (n) => app.travel.back(n),
    until: (what) => app.travel.until(String(what)),
    end: () => app.travel.end(),
    stepRank: (rank) => app.travel.stepRank(rank),
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
    focus: () => app.root.focus({ preventScroll: true }),
    destroy: () => app.destroy(),
  };
}

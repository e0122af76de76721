// Starts from a widget in a notebook: asks the stepper in Python for the record, and for what comes after.
import { mount } from "./app.js";

const PNG = "data:image/png;base64,";

// Pictures that stand in for the widget, in outputs of their own next to it: their files have the widget's mark in a comment.
function picturesOf(element, mark) {
  const area = element.closest(".jp-OutputArea, .output");
  const found = area === null ? [] : [...area.querySelectorAll(`img[src^="${PNG}"]`)];
  return found
    .filter((image) => atob(image.src.slice(PNG.length, PNG.length + 400)).includes(mark))
    .map((image) => image.closest(".jp-OutputArea-child, .output_area") ?? image);
}

function hide(elements) {
  const before = elements.map((element) => element.style.display);
  for (const element of elements) element.style.display = "none";
  return () => elements.forEach((element, i) => (element.style.display = before[i]));
}

const CLOSED = { message: "the stepper was closed", hint: "what was seen can still be looked at, but for tensors" };

// The source of a page whose stepper is alive in a kernel.
class Live {
  constructor(model, view) {
    this.live = true;
    this.model = model;
    this.view = view;
    this.asked = new Map(); // id of a question -> what to do with its answer
    this.heard = new Set();
    this.last = 0;
    this.messages = (message) => this.take(message);
    this.moves = () => this.tell({ index: model.get("index") });
    this.closes = () => model.get("closed") && this.tell({ closed: CLOSED });
    model.on("msg:custom", this.messages);
    model.on("change:index", this.moves);
    model.on("change:closed", this.closes);
  }

  get index() {
    return this.model.get("index");
  }

  ask(question) {
    const id = `${this.view}.${++this.last}`;
    return new Promise((resolve) => {
      this.asked.set(id, resolve);
      this.model.send({ view: this.view, id, ask: question });
    });
  }

  listen(callback) {
    this.heard.add(callback);
    return () => this.heard.delete(callback);
  }

  // The page stands before another step that is known: so does the stepper.
  setIndex(index) {
    if (index === this.model.get("index")) return;
    this.model.set("index", index);
    this.model.save_changes();
  }

  take(message) {
    if (message?.news) {
      this.tell(message.news);
    } else if (this.asked.has(message?.id)) {
      this.asked.get(message.id)(message.answer);
      this.asked.delete(message.id);
    }
  }

  tell(news) {
    for (const callback of this.heard) callback(news);
  }

  destroy() {
    this.model.off("msg:custom", this.messages);
    this.model.off("change:index", this.moves);
    this.model.off("change:closed", this.closes);
    this.model.send({ view: this.view, gone: true });
  }
}

function render({ model, el }) {
  const view = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const source = new Live(model, view);
  el.textContent = "The kernel has not answered yet: it may be busy.";
  let page = null;
  let show = () => {};
  let gone = false;
  source.ask({ do: "record" }).then((answer) => {
    if (gone) return;
    el.textContent = "";
    if (!answer.record) {
      el.textContent = `${answer.error?.message ?? "no answer"}: ${answer.error?.hint ?? ""}`;
      return;
    }
    source.record = answer.record;
    page = mount(el, source);
    show = hide(picturesOf(el, model.get("mark")));
    source.closes();
  });
  return () => {
    gone = true;
    show();
    page?.destroy();
    source.destroy();
  };
}

export default { render };

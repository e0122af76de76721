// Small helpers around the document. Text of programs comes in as text nodes, never as markup.

import { plainText } from "./text.js";

/**
 * An element with attributes and children.
 * @param {string} tag
 * @param {object} attributes `on...` are listeners, `class` and the rest are attributes; null, undefined and false are left out
 * @param {...(Node|string)} children
 */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : plainText(value));
  }
  node.append(...children.map((each) => (typeof each === "string" ? plainText(each) : each)));
  return node;
}

/** Writes text only where it changed: unchanged nodes cost no layout, and are not read out again. */
export function write(node, text) {
  const plain = plainText(text);
  if (node.textContent !== plain) node.textContent = plain;
}

/** Sets an attribute only where it changed; null takes it away. */
export function mark(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== plainText(value)) node.setAttribute(name, plainText(value));
}

/** Shows a button as one that does nothing now. It keeps the focus, which a disabled one would lose, and keys with it. */
export function grey(button, off) {
  mark(button, "aria-disabled", off ? "true" : null);
}

/** Makes children out of data and keeps those that are there: a list of any length costs what changed. */
export function fill(parent, count, create) {
  while (parent.children.length < count) parent.append(create(parent.children.length));
  while (parent.children.length > count) parent.lastElementChild.remove();
  return parent.children;
}

/** A part of the page with a heading; `extra` stands beside the heading. */
export function panel(title, name, ...extra) {
  const heading = make("h3", {}, title);
  const note = make("span", { class: "note" });
  const head = make("div", { class: "head" }, heading, note, ...extra);
  const root = make("section", { class: `panel ${name}`, "aria-label": title }, head);
  return { root, head, note };
}

/** A part of the page that is shut at first: its heading is a button. `opened` is called with whether it is open. */
export function foldable(title, name, key, opened) {
  const sign = make("span", { class: "sign", "aria-hidden": "true" }, "▸");
  const button = make("button", { class: "fold", type: "button", "aria-expanded": "false", title: `key ${key}` }, sign, title);
  const note = make("span", { class: "note" });
  const body = make("div", { class: "body", hidden: true });
  const root = make("section", { class: `panel ${name}`, "aria-label": title }, make("div", { class: "head" }, make("h3", {}, button), note), body);
  const fold = { root, body, note, open: false };
  fold.toggle = (open = !fold.open) => {
    fold.open = open;
    body.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    sign.textContent = open ? "▾" : "▸";
    opened(open);
  };
  button.addEventListener("click", () => fold.toggle());
  return fold;
}

/** Collects what has to be undone when the page goes: listeners, observers, timers. */
export class Undo {
  constructor() {
    this._all = [];
  }

  /** Listens until undone. */
  on(target, type, listener, options) {
    target.addEventListener(type, listener, options);
    this._all.push(() => target.removeEventListener(type, listener, options));
  }

  add(undo) {
    this._all.push(undo);
  }

  all() {
    while (this._all.length) this._all.pop()();
  }
}

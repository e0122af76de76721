// The tensors that a rank holds by the names that its program has for them, and the numbers of one of them.

import { bytesText } from "./paint.js";
import { isWhole, numberText, plainText } from "./text.js";
import { pairKey } from "./record.js";
import { foldable, make, write } from "./dom.js";
import { shellTest } from "./goals.js";

const MOST_ROWS = 24;
const MOST_COLUMNS = 16;
const MOST_SLICES = 6;

/**
 * What a rank held at a step, as the record says; null where the record has no tensors.
 * @returns {object[]|null} as `Held.as_dict()`, and `value`: nested lists, or undefined where they are not kept
 */
export function tensorsOf(recording, rank, index) {
  const { tensors } = recording.tables;
  if (!tensors.n) return null;
  const series = recording.series("tensors");
  const found = [];
  const names = recording.namesOf || (recording.namesOf = new Map());
  if (!names.has(rank) || names.get(rank).n !== tensors.n) {
    const own = new Set();
    const of = tensors.column("rank");
    for (let i = 0; i < tensors.n; i++) if (of[i] === rank) own.add(tensors.column("name")[i]);
    names.set(rank, { n: tensors.n, own });
  }
  for (const name of names.get(rank).own) {
    const row = series.at(pairKey(rank, name), index);
    const about = row < 0 ? -1 : tensors.column("about")[row];
    if (about < 0) continue;
    const value = tensors.column("value")[row];
    found.push({ ...recording.abouts[about], name: recording.text(name), value: value < 0 ? undefined : recording.values[value] });
  }
  return found;
}

/** Nested numbers as tables of rows and columns; more than two dimensions are cut into slices. */
function slices(value, path = []) {
  if (!Array.isArray(value)) return [{ path, rows: [[value]] }];
  if (!value.length || !Array.isArray(value[0])) return [{ path, rows: [value] }];
  if (!Array.isArray(value[0][0])) return [{ path, rows: value }];
  return value.slice(0, MOST_SLICES).flatMap((each, i) => slices(each, [...path, i])).slice(0, MOST_SLICES);
}

function numbersTable({ path, rows }, whole) {
  const wide = rows[0] ? rows[0].length : 0;
  const line = (row) => {
    const cells = row.slice(0, MOST_COLUMNS).map((each) => make("td", {}, numberText(each, whole)));
    return make("tr", {}, ...cells, ...(wide > MOST_COLUMNS ? [make("td", {}, `… ${wide - MOST_COLUMNS} more`)] : []));
  };
  const body = rows.slice(0, MOST_ROWS).map(line);
  if (rows.length > MOST_ROWS) body.push(make("tr", {}, make("td", {}, `… ${rows.length - MOST_ROWS} more rows`)));
  const caption = path.length ? [make("caption", {}, `[${path.join(", ")}]`)] : [];
  return make("table", { class: "numbers" }, ...caption, make("tbody", {}, ...body));
}

/** The tensors' part of the page. */
export class Tensors {
  /** @param {object} app what is shown: selected, tensorsAt() -> Promise of {tensors} or {error}, valueOf(tensor) likewise */
  constructor(app) {
    this.app = app;
    this.fold = foldable("Tensors of the selected rank", "tensors", "t", () => app.draw());
    this.root = this.fold.root;
    this.filter = make("input", { type: "text", placeholder: "all: * for any letters", "aria-label": "names to show", oninput: () => this._list() });
    this.says = make("p", { class: "caption" });
    const titles = ["name", "dtype", "shape", "bytes", "category", "layout", "learns"];
    this.body = make("tbody");
    const table = make("table", { class: "list" }, make("thead", {}, make("tr", {}, ...titles.map((each) => make("th", { scope: "col" }, each)))), this.body);
    this.value = make("div", { class: "value", "aria-live": "polite" });
    this.fold.body.append(
      make("div", { class: "row" }, make("label", {}, "names ", this.filter)),
      this.says,
      make("div", { class: "scroll", tabindex: "0", "aria-label": "tensors" }, table),
      this.value,
    );
    this.chosen = null;
    this.tensors = [];
  }

  renew() {}

  async draw() {
    const asked = (this.asked = {});
    if (!this.fold.open) return write(this.fold.note, ""); // what it said may be so no more
    const found = await this.app.tensorsAt();
    if (asked !== this.asked) return undefined; // the page has gone on meanwhile
    this.tensors = found.tensors || [];
    write(this.fold.note, `rank ${this.app.selected}, ${this.tensors.length} with a name`);
    const none = found.tensors && !found.tensors.length ? "it holds none that its program has a name for" : "";
    write(this.says, found.error ? `${found.error.message}${found.error.hint ? `: ${found.error.hint}` : ""}` : none);
    this._list();
    return this._value(asked);
  }

  _list() {
    const pattern = this.filter.value.trim();
    const test = pattern ? shellTest(pattern.includes("*") ? pattern : `*${pattern}*`) : () => true;
    const shown = this.tensors.filter((each) => test(each.name));
    this.body.replaceChildren(...shown.map((each) => this._row(each)));
  }

  _row(tensor) {
    const pick = () => {
      this.chosen = this.chosen === tensor.name ? null : tensor.name;
      this._list();
      this._value(this.asked);
    };
    const own = this.chosen === tensor.name;
    const name = make("button", { class: "link", type: "button", "aria-expanded": String(own), onclick: pick }, tensor.name);
    const whole = tensor.shape.length && !tensor.bytes && !tensor.shape.includes(0) ? "in shards, not whole now" : bytesText(tensor.bytes);
    const cells = [tensor.dtype, `[${tensor.shape.join(", ")}]`, whole, tensor.category, tensor.layout || "", tensor.requires_grad ? "yes" : ""];
    return make("tr", { class: own ? "chosen" : null }, make("td", {}, name), ...cells.map((each) => make("td", {}, each)));
  }

  async _value(asked) {
    const tensor = this.tensors.find((each) => each.name === this.chosen);
    if (!tensor) return this.value.replaceChildren();
    const found = tensor.value !== undefined ? { value: tensor.value } : await this.app.valueOf(tensor);
    if (asked !== this.asked) return undefined;
    const title = make("p", { class: "caption" }, `${tensor.name} on rank ${this.app.selected}: ${tensor.dtype}[${tensor.shape.join(", ")}]`);
    if (found.error) title.append(plainText(`; ${found.error.message}`));
    const parts = found.error ? [] : slices(found.value).map((each) => numbersTable(each, isWhole(tensor.dtype)));
    return this.value.replaceChildren(title, make("div", { class: "scroll" }, ...parts));
  }
}

// A record of a program: tables of columns as Python wrote them, text by number, and series that answer "what was the
// last before this step" by a binary search. Nothing is replayed, so any step costs the same, back as well as on.

const KEY_SPAN = 2 ** 22; // two small numbers as one key: strings and ranks are far fewer

/** One key of two whole numbers, the second below 2^22. */
export function pairKey(first, second) {
  return first * KEY_SPAN + second;
}

function bytesOf(base64) {
  if (typeof Uint8Array.fromBase64 === "function") return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

const KINDS = { i8: Int8Array, i16: Int16Array, i32: Int32Array, f64: Float64Array };

/**
 * Numbers of a column.
 * @param {{type: "i8"|"i16"|"i32"|"f64", data: string}} column base64 of little endian numbers
 * @returns {Int32Array|Float64Array} whole numbers have one width in memory, so that columns can be joined
 */
export function decodeColumn(column) {
  const kind = KINDS[column.type];
  if (!kind) throw new Error(`a column of ${column.type} cannot be read`);
  const numbers = new kind(bytesOf(column.data).buffer);
  return kind === Float64Array || kind === Int32Array ? numbers : Int32Array.from(numbers);
}

/** Rows in columns. A column is decoded when it is first asked for, and grows in place: a live program adds rows. */
export class Table {
  constructor(json) {
    this.n = 0;
    this._coded = {};
    this._columns = {};
    if (json) {
      this.n = json.n;
      this._coded = { ...json.columns };
    }
  }

  /** The numbers of a column, at least n of them; none where there is no such column. */
  column(name) {
    let found = this._columns[name];
    if (!found) {
      found = this._coded[name] ? decodeColumn(this._coded[name]) : new Int32Array(this.n);
      this._columns[name] = found;
    }
    return found;
  }

  has(name) {
    return name in this._coded;
  }

  append(json) {
    if (!json || !json.n) return;
    const n = this.n + json.n;
    for (const name of Object.keys(json.columns)) {
      const added = decodeColumn(json.columns[name]);
      let own = this._coded[name] || this._columns[name] ? this.column(name) : new added.constructor(this.n);
      if (own.length < n) {
        const wider = new added.constructor(Math.max(n, 2 * own.length)); // doubling: a row costs the same however long it is
        wider.set(own.subarray(0, this.n));
        own = wider;
      }
      own.set(added, this.n);
      this._columns[name] = own;
      this._coded[name] = json.columns[name];
    }
    this.n = n;
  }
}

/** Rows of a table by key, each key's in the order of their steps. */
export class Series {
  /**
   * @param {Table} table has a column `step`: from which step on a row is seen
   * @param {string[]} keys one or two columns
   */
  constructor(table, keys) {
    this.table = table;
    this.keys = keys;
    this.groups = new Map(); // in the order in which keys are first seen in the table: rows up to a step, see `until`
    this._seen = 0;
  }

  /** Sorts rows by key up to a step: rows come in the order of their steps, and a page begins with few of them. */
  until(index) {
    const { table, keys } = this;
    if (this._seen === table.n || table.column("step")[this._seen] > index) return this;
    const first = table.column(keys[0]);
    const second = keys.length > 1 ? table.column(keys[1]) : null;
    const step = table.column("step");
    const mixed = new Set();
    let key = NaN;
    let rows = null;
    let i = this._seen;
    for (; i < table.n && step[i] <= index; i++) {
      const own = second ? pairKey(first[i], second[i]) : first[i];
      if (own !== key) {
        key = own;
        rows = this.groups.get(key);
        if (!rows) this.groups.set(key, (rows = []));
      }
      if (rows.length && step[rows[rows.length - 1]] > step[i]) mixed.add(rows);
      rows.push(i);
    }
    for (const each of mixed) each.sort((a, b) => step[a] - step[b] || a - b);
    this._seen = i;
    return this;
  }

  /** The last row of a key that is seen at a step, or -1. */
  at(key, index) {
    const rows = this.until(index).groups.get(key);
    return rows ? this.within(rows, index) : -1;
  }

  /** The same for one of the `groups`. */
  within(rows, index) {
    const count = this.count(rows, index);
    return count ? rows[count - 1] : -1;
  }

  /** How many rows of a group are seen at a step. */
  count(rows, index) {
    const step = this.table.column("step");
    let low = 0;
    let high = rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (step[rows[middle]] <= index) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** How many of ascending numbers are below a limit. */
export function countBelow(numbers, limit, n = numbers.length) {
  let low = 0;
  let high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

const TABLES = ["ops", "steps", "memory", "peaks", "standing", "streams", "marks", "works", "open", "parts", "coming", "tensors"];
const OP = ["kind", "name", "group", "given", "scope", "phase", "stream", "line", "detail", "label", "code"];
const SERIES = {
  memory: ["rank", "category"],
  peaks: ["rank"],
  standing: ["rank"],
  streams: ["rank", "stream"],
  marks: ["rank"],
  parts: ["open"],
  tensors: ["rank", "name"],
};

/** Everything that is known of a program, and may come to be more. */
export class Recording {
  /** @param {object} json a record of format 1 */
  constructor(json) {
    if (!json || json.format !== 1) throw new Error(`this page reads records of format 1, not ${json && json.format}`);
    this.about = json; // what grows is its own: a notebook shows one record in several views
    this.ranks = json.ranks;
    this.strings = [...json.strings];
    this.members = [...(json.members || [])];
    this.walks = { ...json.walks };
    this.abouts = [...(json.abouts || [])];
    this.values = [...(json.values || [])];
    this.tables = {};
    for (const name of TABLES) this.tables[name] = new Table(json[name]);
    this._series = {};
    this._ops = [];
    this._say(json);
    this._taken = new Map(json.ranks.map((rank) => [rank, []])); // rank -> its steps
    this._taken_seen = 0;
    this.setSpans(json);
  }

  _say(json) {
    this.known = json.known;
    this.ended = json.ended;
    this.error = json.error;
    this.notes = json.notes || [];
  }

  /** What a step does, without its rank: few are different, so each is put together once. */
  op(row) {
    let found = this._ops[row];
    if (!found) {
      found = {};
      for (const name of OP) found[name] = this.text(this.tables.ops.column(name)[row]);
      this._ops[row] = found;
    }
    return found;
  }

  /** The text that a number stands for. */
  text(id) {
    return this.strings[id] || "";
  }

  /** The furthest step to stand before: a program that goes on stands before its last known one. */
  get last() {
    return this.ended ? this.known : Math.max(this.known - 1, 0);
  }

  /** The rows of a table by key. */
  series(name) {
    return (this._series[name] ??= new Series(this.tables[name], SERIES[name]));
  }

  /** The steps of one rank, ascending. */
  taken(rank) {
    const ranks = this.tables.steps.column("rank");
    for (; this._taken_seen < this.tables.steps.n; this._taken_seen++) {
      const own = this._taken.get(ranks[this._taken_seen]);
      if (own) own.push(this._taken_seen);
    }
    return this._taken.get(rank) || [];
  }

  /** What the program did since: only rows that are new, and the ends of intervals that were open. */
  add(part) {
    for (const text of part.strings || []) this.strings.push(text);
    for (const name of TABLES) if (name !== "coming") this.tables[name].append(part[name]);
    this.tables.coming = new Table(part.coming); // what is known of now, and not a history
    for (const [name, ended] of Object.entries(part.ends || {})) {
      const table = new Table(ended);
      const ends = this.tables[name].column("end");
      for (let i = 0; i < table.n; i++) ends[table.column("row")[i]] = table.column("end")[i];
    }
    this.members.push(...(part.members || []));
    this.abouts.push(...(part.abouts || []));
    this.values.push(...(part.values || []));
    Object.assign(this.walks, part.walks || {});
    this._say({ known: this.known, ended: this.ended, error: this.error, notes: this.notes, ...part });
  }

  /** Priced bars, all anew: what came may have moved those before it. */
  setSpans(json) {
    for (const text of (json !== this.about && json.strings) || []) this.strings.push(text);
    this.rows = json.rows || [];
    this.spans = new Table(json.spans);
    this.hosts = new Table(json.hosts);
    this.host = new Series(this.hosts, ["rank"]);
    this.provisional = Boolean(json.provisional);
    this.step_time_s = json.step_time_s ?? null;
    this.paints = json.paints || [];
    this.palette = this.about.palette || this.paints; // of everything that a step may be
  }
}

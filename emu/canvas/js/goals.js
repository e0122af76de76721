// What "until" waits for, over the steps that are known: the same matches as Python's `Stepper.until`.

const ANY = null; // any letters, or none

/** Whether a letter is one of "[...]": its ranges, and letters, after a "!" that turns it around. */
function setTest(inner) {
  const letters = Array.from(inner);
  const turned = letters[0] === "!";
  const ranges = [];
  for (let i = turned ? 1 : 0; i < letters.length; ) {
    const far = letters[i + 1] === "-" && i + 2 < letters.length;
    ranges.push([letters[i], letters[far ? i + 2 : i]].map((each) => each.codePointAt(0))); // one that runs backwards has none
    i += far ? 3 : 1;
  }
  return (letter) => {
    const code = letter.codePointAt(0);
    return ranges.some(([low, high]) => low <= code && code <= high) !== turned;
  };
}

function partsOf(pattern) {
  const parts = [];
  for (let i = 0; i < pattern.length; ) {
    const letter = String.fromCodePoint(pattern.codePointAt(i));
    // In [abc] a "]" that comes first is one of the letters.
    const close = letter === "[" ? pattern.indexOf("]", i + (pattern[i + 1] === "!" ? 3 : 2)) : -1;
    if (letter === "*") parts.push(ANY);
    else if (letter === "?") parts.push(() => true);
    else if (close > 0) parts.push(setTest(pattern.slice(i + 1, close)));
    else parts.push((other) => other === letter);
    i = close > 0 ? close + 1 : i + letter.length;
  }
  return parts;
}

/** A shell pattern with *, ? and [abc] as a test of whole text; as fnmatchcase, everything else stands for itself. */
export function shellTest(pattern) {
  const parts = partsOf(pattern);
  return (text) => {
    const letters = Array.from(text);
    // Only the last * may have to take more: what those before it took is enough. So no pattern takes long.
    let [part, star, from] = [0, -1, 0];
    for (let i = 0; i < letters.length; ) {
      if (part < parts.length && parts[part] !== ANY && parts[part](letters[i])) {
        part += 1;
        i += 1;
      } else if (part < parts.length && parts[part] === ANY) {
        star = part;
        from = i;
        part += 1;
      } else if (star >= 0) {
        from += 1;
        i = from;
        part = star + 1;
      } else return false;
    }
    return parts.slice(part).every((each) => each === ANY);
  };
}

/** Whether a pattern matches a whole text. */
export function matches(pattern, text) {
  return shellTest(pattern)(text);
}

function isCalled(op, test) {
  return [op.name, op.kind, op.label].some(test) || (op.given !== "" && test(op.given));
}

function isWithin(op, test) {
  const parts = op.scope.split(".");
  for (let i = 1; i <= parts.length; i++) {
    const path = parts.slice(0, i).join(".");
    if (path && test(path)) return true;
  }
  return op.phase !== "" && test(op.phase);
}

/** What is true of a step for each different op, found once. */
function remembered(recording, of) {
  const found = [];
  return (row) => (found[row] ??= of(recording.op(row)));
}

/**
 * The first step after `start` that is called so, or that is the first of its rank in such a scope or phase.
 * @param {Recording} recording
 * @param {string} what a name, "group.kind", a scope, a phase, a mark, "rank 2" or "2", with * for any letters
 * @param {number} start steps taken where the search begins
 * @returns {number} -1 where none is known
 */
export function findGoal(recording, what, start) {
  const test = shellTest(/^\d+$/.test(what) ? `rank ${what}` : what);
  const { steps } = recording.tables;
  const ranks = steps.column("rank");
  const ops = steps.column("op");
  const called = remembered(recording, (op) => isCalled(op, test));
  const within = remembered(recording, (op) => isWithin(op, test));
  const named = new Set(recording.ranks.filter((rank) => test(`rank ${rank}`)));
  const inside = new Map();
  for (let i = Math.min(start, steps.n - 1); i >= 0 && inside.size < recording.ranks.length; i--) {
    if (!inside.has(ranks[i])) inside.set(ranks[i], within(ops[i]));
  }
  for (let i = start + 1; i < steps.n; i++) {
    const enters = within(ops[i]) && !inside.get(ranks[i]);
    inside.set(ranks[i], within(ops[i]));
    if (enters || called(ops[i]) || named.has(ranks[i])) return i;
  }
  return -1;
}

/** For a search that found nothing: names in what is known that are like `what`, or some of those that there are. */
export function hintFor(recording, what, index) {
  const texts = new Set();
  const steps = recording.tables.steps;
  for (const row of new Set(steps.column("op").subarray(index + 1, steps.n))) {
    const op = recording.op(row);
    for (const text of [op.name, op.label, op.given, op.scope, op.phase]) if (text) texts.add(text);
  }
  const pairs = (text) => new Set(Array.from({ length: Math.max(text.length - 1, 0) }, (_, i) => text.slice(i, i + 2)));
  const own = pairs(what.toLowerCase());
  const scored = [];
  for (const text of texts) {
    const other = pairs(text.toLowerCase());
    let shared = 0;
    for (const pair of own) shared += other.has(pair) ? 1 : 0;
    scored.push([shared / Math.max(own.size + other.size, 1), text]);
  }
  const near = scored.filter(([score]) => score > 0.25).sort((a, b) => b[0] - a[0]).slice(0, 5);
  if (!texts.size) return "nothing comes after this step; step back to look again";
  const most = 12; // as many as a reader looks at
  const names = (near.length ? near : scored.slice(0, most)).map(([, text]) => text).join(", ");
  return `${near.length ? "near it is" : "ahead there is"} ${names}${!near.length && scored.length > most ? ", …" : ""}; step back to look again`;
}

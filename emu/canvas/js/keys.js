// What keys do. They work where the page or the widget has the focus, and never where text is written.

/** Keys, what they do, and what the help says: [keys, command, words]. */
export const KEYS = [
  [["ArrowRight", "n"], "next", "→ or n", "one step on"],
  [["ArrowLeft", "b"], "back", "← or b", "one step back"],
  [["Shift+ArrowRight"], "next10", "Shift →", "ten steps on"],
  [["Shift+ArrowLeft"], "back10", "Shift ←", "ten steps back"],
  [["Home"], "first", "Home", "to the beginning"],
  [["End"], "end", "End", "to the end"],
  [["r"], "stepRank", "r", "the selected rank takes its next step"],
  [["g"], "jump", "g", "write a step to go to"],
  [["u"], "until", "u", "write what to go on to"],
  [["ArrowUp"], "rankUp", "↑ ↓", "select a rank"],
  [["ArrowDown"], "rankDown", "", ""],
  [["c"], "collective", "c", "the last collective, chunk by chunk"],
  [["["], "hopBack", "[ ]", "its hops"],
  [["]"], "hopOn", "", ""],
  [["t"], "tensors", "t", "tensors of the selected rank"],
  [["+", "="], "zoomIn", "+ −", "zoom the timeline; Ctrl and wheel too"],
  [["-"], "zoomOut", "", ""],
  [["0"], "zoomAll", "0", "all of the timeline; double click too"],
  [[",", "."], "pan", ", .", "move the zoomed timeline; drag it too"],
  [["?"], "help", "?", "this list"],
  [["Escape"], "escape", "Esc", "leave a field, shut this list"],
];

const WRITES = new Set(["INPUT", "TEXTAREA", "SELECT"]);

/**
 * The command of a key, or null: of keys that are written into a field, and of keys with Ctrl, Alt or Meta, there is none.
 * @param {KeyboardEvent} event
 */
export function commandOf(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return null;
  const target = event.composedPath()[0];
  if (event.key === "Escape") return "escape";
  if (target && (WRITES.has(target.tagName) || target.isContentEditable)) return null;
  const name = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
  const found = KEYS.find(([keys]) => keys.includes(name));
  if (!found) return null;
  if (found[1] === "pan") return event.key === "," ? "panBack" : "panOn";
  return found[1];
}

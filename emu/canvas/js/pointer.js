// Wheel, drag, click and what is said of the bar under the pointer: the timeline's gestures.

import { fill, make, write } from "./dom.js";
import { timeText } from "./paint.js";

const NEAR = 2; // pixels beside a bar that still mean it: bars may be thinner than that

/** The bar under the pointer: [row, bar], each -1 where there is none. */
function under(line, event) {
  const row = line.rowAt(event.offsetY);
  const left = event.offsetX < line.left;
  return [row, row < 0 || left ? -1 : line.bars.at(row, line.timeAt(event.offsetX), NEAR / line.scale)];
}

function wordsOf(line, row, bar) {
  const { bars } = line;
  const { rank, name } = bars.rows[row];
  const words = [line.app.recording.text(bars.label[bar]), `rank ${rank}, ${name}; step ${bars.step[bar] - 1}`];
  if (line.by_step) return words;
  const [start, moves, end] = [bars.start[bar], bars.moves[bar], bars.end[bar]];
  words.push(`${timeText(start)} to ${timeText(end)}: ${timeText(end - start)}`);
  if (moves > start) words.push(`${timeText(moves - start)} of it waiting for other ranks`);
  const stretch = bars.alone ? end - moves - bars.alone[bar] : 0;
  if (stretch > 1e-3 * (end - moves)) words.push(`${timeText(stretch)} of it for sharing links or its device`);
  return words;
}

function say(line, event) {
  const [row, bar] = under(line, event);
  line.tip.hidden = bar < 0;
  if (bar < 0) return;
  const words = wordsOf(line, row, bar);
  fill(line.tip, words.length, () => make("div"));
  words.forEach((text, i) => write(line.tip.children[i], text));
  const right = event.offsetX > line.width / 2;
  line.tip.style.left = right ? "auto" : `${event.offsetX + 12}px`;
  line.tip.style.right = right ? `${line.width - event.offsetX + 12}px` : "auto";
  line.tip.style.top = `${event.offsetY + 14}px`;
}

function roll(line, event) {
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (event.ctrlKey || event.metaKey) line.zoom(Math.exp(-event.deltaY / 240), line.shareAt(event.offsetX));
  else if (sideways && line.view) line.pan((event.deltaX || event.deltaY) / 600);
  else if (sideways || !line.scroll(event.deltaY)) return; // nothing moves here, so the page scrolls
  event.preventDefault();
}

/** Makes a timeline listen to the pointer, until its `undo` is called. */
export function listen(line) {
  const { canvas, undo } = line;
  let held = null;
  undo.on(canvas, "wheel", (event) => roll(line, event), { passive: false });
  undo.on(canvas, "pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.offsetX, y: event.offsetY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  undo.on(canvas, "pointermove", (event) => {
    if (!held) {
      say(line, event);
      return;
    }
    const [dx, dy] = [held.x - event.offsetX, held.y - event.offsetY];
    if (!held.moved && Math.hypot(dx, dy) < 4) return;
    line.tip.hidden = true;
    line.pan(dx / (line.width - line.left));
    line.scroll(dy);
    held = { x: event.offsetX, y: event.offsetY, moved: true };
  });
  undo.on(canvas, "pointerup", (event) => {
    const click = held && !held.moved;
    held = null;
    if (!click) return;
    const [row, bar] = under(line, event);
    if (row >= 0) line.app.select(line.bars.rows[row].rank);
    if (bar >= 0) line.app.travel.goto(line.bars.step[bar]);
  });
  undo.on(canvas, "pointercancel", () => (held = null));
  undo.on(canvas, "pointerleave", () => (line.tip.hidden = true));
  undo.on(canvas, "dblclick", () => line.zoom(0));
}

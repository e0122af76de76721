// The two kept layers of a timeline: all bars in full, and a page with names, an axis and the same bars, faded. They are
// drawn again when what is seen changes, and only put together at a step.

import { Brushes, FONT, centred, cutText, sized, ticksOf, timeUnit } from "./paint.js";
import { drawRow } from "./bars.js";
import { Strip } from "./strip.js";

export const AXIS = 34; // pixels under the rows
export const TOP = 14; // above them, for the triangle of the next rank
export const RIGHT = 14; // beside them
const FADED = 0.26;
const BAR = [0.13, 0.87]; // where a bar begins and ends in its row

/** Layers of a timeline, which knows where its rows are: see Timeline. */
export class Layers {
  constructor() {
    this.brushes = new Brushes();
    this.full = document.createElement("canvas");
    this.page = document.createElement("canvas");
  }

  /** Draws both anew. */
  draw(line) {
    const { inks } = line.app;
    const scale = window.devicePixelRatio || 1;
    const full = sized(this.full, line.width, line.height, scale);
    const page = sized(this.page, line.width, line.height, scale);
    const [low, high] = line.window;
    const view = { low, high, left: line.left, scale: line.scale, pixel: 1 / scale };
    const span = line.width - line.left - RIGHT;
    full.fillStyle = inks.ground; // not see-through: it covers what is faded
    full.fillRect(0, 0, line.width, line.height);
    for (const context of [full, page]) {
      context.save();
      context.beginPath();
      context.rect(0, TOP - 2, line.width, line.seen + 4);
      context.clip();
    }
    const strip = new Strip(this.full.width);
    line.each((row, y) => {
      const from = y + BAR[0] * line.pitch;
      drawRow(full, line.bars, row, view, from, (BAR[1] - BAR[0]) * line.pitch, this.brushes, inks, strip);
      page.fillStyle = inks.line;
      page.fillRect(line.left, y + BAR[1] * line.pitch, span, 1);
    });
    page.globalAlpha = FADED;
    page.drawImage(this.full, line.left * scale, 0, (span + 1) * scale, this.full.height, line.left, 0, span + 1, line.height);
    page.globalAlpha = 1;
    this._names(page, line, inks);
    for (const context of [full, page]) context.restore();
    this._axis(page, line, inks, low, high);
  }

  /** Puts them together: full up to where each row's issued bars end. */
  join(context, line, index) {
    const scale = window.devicePixelRatio || 1;
    const [low] = line.window;
    context.drawImage(this.page, 0, 0, line.width, line.height);
    line.each((row, y) => {
      const until = Math.min(line.left + (line.bars.issuedUntil(row, index) - low) * line.scale, line.width - RIGHT);
      const from = Math.max(y + BAR[0] * line.pitch, TOP);
      const tall = Math.min(y + BAR[1] * line.pitch, line.height - AXIS) - from;
      const wide = until - line.left;
      if (wide <= 0 || tall <= 0) return;
      context.drawImage(this.full, line.left * scale, from * scale, wide * scale, tall * scale, line.left, from, wide, tall);
    });
  }

  _names(context, line, inks) {
    const { rows } = line.bars;
    const size = Math.min(11, line.pitch - 1);
    context.textBaseline = "middle";
    line.each((row, y) => {
      const middle = y + line.pitch / 2;
      context.fillStyle = inks.faint;
      context.font = `${size}px ${FONT}`;
      context.textAlign = "right";
      context.fillText(cutText(context, rows[row].name, line.left - line.names_from - 8), line.left - 7, middle);
      if (row && rows[row - 1].rank === rows[row].rank && y > TOP) return;
      context.fillStyle = inks.ink;
      context.font = `bold ${size}px ${FONT}`;
      context.textAlign = "left";
      context.fillText(`rank ${rows[row].rank}`, 4, middle);
    });
  }

  _axis(context, line, inks, low, high) {
    const [unit, unit_s] = line.by_step ? ["steps", 1] : timeUnit(high);
    const y = line.height - AXIS + 4;
    context.fillStyle = inks.faint;
    context.fillRect(line.left, y, line.width - line.left - RIGHT, 1);
    context.font = `10.5px ${FONT}`;
    context.textBaseline = "top";
    for (const [at, text] of ticksOf(low / unit_s, high / unit_s, (line.width - line.left) / 80)) {
      const x = line.left + (at * unit_s - low) * line.scale;
      context.fillRect(x - 0.5, y, 1, 4);
      centred(context, text, x, y + 6, 0, line.width);
    }
    context.textAlign = "right";
    const provisional = line.app.recording.provisional ? ", provisional" : "";
    context.fillText(line.by_step ? "steps taken, of all ranks" : `time (${unit})${provisional}`, line.width - RIGHT, y + 19);
  }
}

// How everything looks: inks by theme, hatches, canvases that are sharp on any screen, and numbers for people.

import { plainText } from "./text.js";

export const FONT = '"DejaVu Sans", Verdana, system-ui, sans-serif';
const BAR_INK = "#222222"; // hatches lie on the colours of bars, which are the same in every theme

const LIGHT = {
  dark: false,
  ink: "#222222",
  faint: "#5f5f5f",
  line: "#e3e3e3",
  edge: "#9a9a9a",
  ground: "#ffffff",
  tint: "#eef3f9",
  cursor: "#c0392b",
  outline: null,
};
const DARK = {
  dark: true,
  ink: "#e8e8e8",
  faint: "#a9afb7",
  line: "#363c44",
  edge: "#8d949d",
  ground: "#171a1e",
  tint: "#222a34",
  cursor: "#ff7a68",
  outline: "rgba(255, 255, 255, 0.45)", // dark bars would drown in a dark page
};

/** Inks of a theme. */
export function inksOf(dark) {
  return dark ? DARK : LIGHT;
}

function luminance(colour) {
  const channel = (i) => {
    const value = parseInt(colour.slice(i, i + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  const y = 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
  return y > 0.008856 ? 116 * Math.cbrt(y) - 16 : 903.3 * y;
}

/** Black or white, whichever can be read on a colour "#rrggbb". */
export function inkOn(colour) {
  return luminance(colour) > 55 ? "#222222" : "#ffffff";
}

/**
 * Makes a canvas as large as it is shown, in the screen's own pixels.
 * @param {number} width, height in CSS pixels
 * @returns {CanvasRenderingContext2D} scaled to CSS pixels, cleared
 */
export function sized(canvas, width, height, scale = window.devicePixelRatio || 1) {
  const w = Math.max(Math.round(width * scale), 1);
  const h = Math.max(Math.round(height * scale), 1);
  const context = canvas.getContext("2d");
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  } else {
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, w, h);
  }
  if (canvas.style) {
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

function strokesOf(letter, at, size) {
  // Diagonals cross the corners too, so that lines go on from tile to tile.
  const lines = {
    "/": [[0, size, size, 0], [0, 2 * size, 2 * size, 0], [-size, size, size, -size]],
    "\\": [[0, 0, size, size], [0, -size, 2 * size, size], [-size, 0, size, 2 * size]],
    "-": [[0, at, size, at]],
    "|": [[at, 0, at, size]],
  };
  if (letter === "x") return [...lines["/"], ...lines["\\"]];
  if (letter === "+") return [...lines["-"], ...lines["|"]];
  return lines[letter] || [];
}

/** The tile of a hatch as matplotlib writes it: "////" is dense, "//" is wide. In screen pixels. */
function hatchTile(hatch, scale) {
  const size = Math.round((hatch.length >= 4 ? 5 : 7.5) * scale);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const context = tile.getContext("2d");
  context.strokeStyle = context.fillStyle = BAR_INK;
  context.lineWidth = Math.max(0.75 * scale, 1);
  const at = Math.floor(size / 2) + 0.5;
  for (const letter of new Set(hatch.toLowerCase())) {
    if (letter === "." || letter === "o") context.fillRect(at - 0.8 * scale, at - 0.8 * scale, 1.5 * scale, 1.5 * scale);
    for (const [x0, y0, x1, y1] of strokesOf(letter, at, size)) {
      context.beginPath();
      context.moveTo(x0, y0);
      context.lineTo(x1, y1);
      context.stroke();
    }
  }
  return tile;
}

const NO_PAINT = { name: "", colour: "#d0d0d0", hatch: "" };

/** Fills areas with colours and hatches; keeps the tiles. */
export class Brushes {
  constructor() {
    this._tiles = new Map();
  }

  /**
   * @param {{colour: string, hatch: string}} paint
   * @param {number} x, y, w, h in CSS pixels
   */
  area(context, paint, x, y, w, h, inks, scale = window.devicePixelRatio || 1) {
    const { colour, hatch } = paint || NO_PAINT;
    context.fillStyle = colour;
    context.fillRect(x, y, w, h);
    if (hatch && w >= 3) {
      context.fillStyle = this._pattern(context, hatch, scale);
      context.fillRect(x, y, w, h);
    }
    if (inks.outline && w >= 3) {
      context.strokeStyle = inks.outline;
      context.lineWidth = 0.6;
      context.strokeRect(x + 0.3, y + 0.3, w - 0.6, h - 0.6);
    }
  }

  _pattern(context, hatch, scale) {
    const key = `${hatch} ${scale}`;
    let tile = this._tiles.get(key);
    if (!tile) this._tiles.set(key, (tile = hatchTile(hatch, scale)));
    const pattern = context.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix([1 / scale, 0, 0, 1 / scale, 0, 0])); // a tile's pixels are the screen's
    return pattern;
  }

  /** A small square of a paint for a legend. */
  swatch(paint, inks) {
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    const context = sized(canvas, 24, 13);
    if (paint === "waiting") {
      context.strokeStyle = inks.edge;
      context.strokeRect(0.5, 0.5, 23, 12);
    } else {
      this.area(context, paint, 0, 0, 24, 13, inks);
      context.strokeStyle = inks.dark ? inks.edge : "#444444";
      context.lineWidth = 0.5;
      context.strokeRect(0.25, 0.25, 23.5, 12.5);
    }
    return canvas;
  }
}

const PREFIXES = { "-12": "p", "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P" };

function metricText(value, unit) {
  if (Number.isNaN(value)) return "not known";
  if (!Number.isFinite(value)) return "infinite";
  if (!value) return `0 ${unit}`;
  let exponent = Math.floor(Math.log10(Math.abs(value)));
  if (Math.abs(value) >= 10 ** (exponent + 1)) exponent += 1; // logarithms round
  const thousands = Math.min(Math.max(Math.floor(exponent / 3) * 3, -12), 15);
  const digits = Math.min(Math.max(2 - (exponent - thousands), 0), 6);
  return `${(value / 10 ** thousands).toFixed(digits)} ${PREFIXES[thousands]}${unit}`;
}

/** Bytes in decimal units with three digits: 3352000 -> "3.35 MB". */
export function bytesText(bytes) {
  return bytes >= 0 && bytes < 1000 && Number.isInteger(bytes) ? `${bytes} B` : metricText(bytes, "B");
}

/** Seconds in the unit that fits, with three digits: 0.000123 -> "123 µs". */
export function timeText(seconds) {
  return metricText(seconds, "s");
}

/** The unit of an axis up to `longest` seconds: [name, seconds]. */
export function timeUnit(longest) {
  const units = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  return longest <= 0 ? units[0] : units.find(([, length]) => longest >= 0.9 * length) || units[3];
}

/** Round numbers from low to high, at most about `most`, each with its text: [number, "20,000"][]. */
export function ticksOf(low, high, most) {
  const rough = (high - low) / Math.max(most, 1);
  if (!(rough > 0)) return [[low, tickText(low, 1)]];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push([i * step, tickText(i * step, step)]);
  return found;
}

/** A number at an axis with the digits that tell it from the next, a step further: 20000 -> "20,000". */
function tickText(at, step) {
  const digits = Math.min(Math.max(-Math.floor(Math.log10(step) + 1e-9), 0), 15);
  const [whole, part] = at.toFixed(digits).replace(/^-(?=[0.]*$)/, "").split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ","); // toLocaleString takes longer than all bars
  return part ? `${grouped}.${part}` : grouped;
}

/** Writes centred text, moved so far that it does not run out of [left, right]. */
export function centred(context, text, x, y, left, right) {
  const half = context.measureText(text).width / 2;
  context.textAlign = "center";
  context.fillText(text, Math.min(Math.max(x, left + half), right - half), y);
}

/** Text cut to a width in pixels, with an ellipsis. */
export function cutText(context, name, width) {
  const text = plainText(name);
  if (context.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? `${text.slice(0, low)}…` : "";
}

/** At most `most` ranks, evenly spread, and those that must be seen among them. */
export function sampleRanks(ranks, most, must = []) {
  if (ranks.length <= most) return ranks;
  const wanted = new Set(must.filter((rank) => ranks.includes(rank)));
  const spread = most - wanted.size;
  for (let i = 0; i < spread; i++) wanted.add(ranks[Math.round((i * (ranks.length - 1)) / Math.max(spread - 1, 1))]);
  return ranks.filter((rank) => wanted.has(rank));
}

// Text for people: numbers that do not pretend to be more exact than they are, and names that cannot rearrange a page.

const UNSEEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
const PLAIN = /^[\n\t\x20-\x7e]*$/; // most text is, and that is found out quickly

function escaped(letter) {
  const code = letter.codePointAt(0);
  const digits = code.toString(16);
  if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

/**
 * Text as a page may show it: what is no printable character is written as Python writes it, "\u202e" for a turn of direction.
 * Names come from programs and files, and some characters would turn around the words that stand after them. Lines and tabs stay.
 */
export function plainText(text) {
  const all = String(text);
  return PLAIN.test(all) ? all : all.replace(UNSEEN, escaped);
}

/** Whether a dtype, e.g. "int64", holds whole numbers, which are shown digit by digit. */
export function isWhole(dtype) {
  return /^(u?int|bool)/.test(dtype || "");
}

/**
 * A number of a tensor: whole numbers of a dtype that has only these exactly; others as short as five digits allow, and so that it
 * is seen where digits were left out (1.2346e7, 2.0000). What JSON lacks comes as text.
 */
export function numberText(value, whole = false) {
  if (typeof value !== "number") return String(value);
  if (whole || (Number.isInteger(value) && Math.abs(value) < 1e7)) return String(value);
  const [digits, power] = value.toExponential(4).split("e");
  const exponent = Number(power);
  if (exponent < -4 || exponent > 3) return `${Number(digits)}e${exponent}`;
  const text = value.toPrecision(5);
  return Number.isInteger(Number(text)) ? text : String(Number(text));
}

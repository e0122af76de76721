// A row of screen pixels in which bars thinner than a pixel are gathered. A canvas is given it as one picture: tens of thousands of
// rectangles of a fraction of a pixel look the same, and take longer than all the rest of a page.

const OTHER = [0xd0, 0xd0, 0xd0];

function channels(paint) {
  const colour = paint && /^#[0-9a-f]{6}$/i.test(paint.colour) ? paint.colour : null;
  return colour ? [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16)) : OTHER;
}

/** Shares of colours by screen pixel. */
export class Strip {
  /** @param {number} width in screen pixels */
  constructor(width) {
    this.canvas = document.createElement("canvas");
    this.canvas.width = Math.max(width, 1);
    this.canvas.height = 1;
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.image = this.context.createImageData(this.canvas.width, 1);
    this.sums = new Float64Array(4 * this.canvas.width); // red, green and blue times share, and the share
  }

  /** @param {object[]} paints that are added by number; -1: none of them */
  clear(paints) {
    this.colours = [OTHER, ...paints.map(channels)];
    this.sums.fill(0);
    this.used = false;
  }

  /** What lies between two places, in pixels, has a paint. */
  add(from, to, paint) {
    const colour = this.colours[paint + 1];
    const { sums } = this;
    const end = Math.min(to, sums.length / 4);
    for (let pixel = Math.floor(from); pixel < end; pixel++) {
      const share = Math.min(end, pixel + 1) - Math.max(from, pixel);
      const at = 4 * pixel;
      sums[at] += share * colour[0];
      sums[at + 1] += share * colour[1];
      sums[at + 2] += share * colour[2];
      sums[at + 3] += share;
    }
    this.used = true;
  }

  /** @param {number} pixel CSS pixels to a screen pixel */
  draw(context, y, height, pixel) {
    if (!this.used) return;
    const { sums } = this;
    const { data } = this.image;
    for (let i = 0; i < sums.length; i += 4) {
      const share = sums[i + 3];
      if (share) for (let c = 0; c < 3; c++) data[i + c] = sums[i + c] / share;
      data[i + 3] = 255 * Math.min(share, 1);
    }
    this.context.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, 0, y, this.canvas.width * pixel, height);
    context.imageSmoothingEnabled = true;
  }
}

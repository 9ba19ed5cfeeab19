// Drawings on canvases: sparklines, the last steps, the map of KV blocks. They know numbers and colours, nothing else.
"use strict";

const NUM_REQUEST_COLOURS = 10;
// As server/status/document.py sends them.
const FREE = -1;
const CACHED = -2;

/** The page's colours as its style sheet has them now, light or dark. */
class Palette {
  constructor() {
    this._known = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._known.clear());
  }

  /**
   * @param {string} name Of a custom property, without its dashes.
   * @returns {string}
   */
  get(name) {
    if (!this._known.has(name)) {
      this._known.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    }
    return this._known.get(name);
  }
}

const palette = new Palette();

/**
 * Make a canvas as sharp as the screen, and empty.
 * @param {HTMLCanvasElement} canvas
 * @returns {{pen: CanvasRenderingContext2D, width: number, height: number}} Sizes in CSS pixels.
 */
function openCanvas(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const density = devicePixelRatio || 1;
  const [columns, rows] = [Math.round(width * density), Math.round(height * density)];
  if (canvas.width !== columns || canvas.height !== rows) [canvas.width, canvas.height] = [columns, rows];
  const pen = canvas.getContext("2d");
  pen.setTransform(density, 0, 0, density, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/**
 * Draw values against time, the latest at the right; a null is a gap.
 * @param {HTMLCanvasElement} canvas
 * @param {(?number)[]} values
 * @param {string} colour Its name.
 * @param {(?number)[]} [worst] Of each value, for a lighter line above it.
 * @param {number} [atLeast] The scale reaches so far.
 */
function drawSparkline(canvas, values, colour, worst = [], atLeast = 0) {
  const { pen, width, height } = openCanvas(canvas);
  const top = Math.max(atLeast, ...values.filter((value) => value !== null), ...worst.filter((value) => value !== null));
  const x = (index) => 1 + (index / Math.max(1, values.length - 1)) * (width - 2);
  const y = (value) => height - 1.5 - (top ? value / top : 0) * (height - 4);
  pen.fillStyle = palette.get("line");
  pen.fillRect(0, height - 1, width, 1);
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.strokeStyle = pen.fillStyle = palette.get(colour);
  pen.globalAlpha = 0.3;
  drawLine(pen, worst, x, y);
  pen.globalAlpha = 1;
  drawLine(pen, values, x, y);
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {(?number)[]} values
 * @param {function(number): number} x Of an index.
 * @param {function(number): number} y Of a value.
 */
function drawLine(pen, values, x, y) {
  pen.beginPath();
  let isDrawing = false;
  values.forEach((value, index) => {
    if (value !== null && isDrawing) pen.lineTo(x(index), y(value));
    else if (value !== null) pen.moveTo(x(index) - 0.75, y(value)), pen.lineTo(x(index), y(value));
    isDrawing = value !== null;
  });
  pen.stroke();
}

/**
 * Draw a bar a step, the latest at the right, of parts on top of each other.
 * @param {HTMLCanvasElement} canvas
 * @param {number[][]} bars Each bar's parts, lowest first.
 * @param {string[]} colours Of the parts.
 * @param {number} top Where the scale ends.
 * @param {number} numPlaces Bars that there is room for.
 */
function drawBars(canvas, bars, colours, top, numPlaces) {
  const { pen, width, height } = openCanvas(canvas);
  pen.fillStyle = palette.get("line");
  for (const share of [0, 0.5, 1]) pen.fillRect(0, Math.round(share * (height - 1)), width, 1);
  const place = width / numPlaces;
  const gap = place > 5 ? 2 : 1;
  bars.forEach((parts, index) => {
    const left = width - (bars.length - index) * place;
    let base = height - 1;
    parts.forEach((part, which) => {
      if (!part) return;
      const size = Math.max(1, (part / top) * (height - 1));
      pen.fillStyle = palette.get(colours[which]);
      pen.fillRect(left + gap / 2, base - size, place - gap, size);
      base -= size;
    });
  });
}

/** A grid of squares, one a KV block or several. */
class BlockGrid {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this._canvas = canvas;
    /** @type {number[]} What each cell shows: a place among the running requests, or a code. */
    this._cells = [];
    this._columns = this._pitch = 1;
  }

  /**
   * @param {number[][]} runs Of (what, how many).
   * @param {function(number): string} colourOf The colour's name of a running request, by its place.
   * @param {?number} pinned The place of the request that stands out; null = all do.
   */
  draw(runs, colourOf, pinned) {
    this._cells = runs.flatMap(([what, count]) => Array(count).fill(what));
    const { pen, width, height } = openCanvas(this._canvas);
    this._fit(width, height);
    const size = this._pitch - (this._pitch > 6 ? 2 : this._pitch > 3 ? 1 : 0);
    this._cells.forEach((what, index) => {
      pen.fillStyle = palette.get(this._nameColour(what, colourOf));
      pen.globalAlpha = pinned === null || what === pinned || what < 0 ? 1 : 0.22;
      const [row, column] = [Math.floor(index / this._columns), index % this._columns];
      pen.fillRect(column * this._pitch, row * this._pitch, size, size);
    });
    pen.globalAlpha = 1;
  }

  /**
   * @param {MouseEvent} event On the canvas.
   * @returns {?{index: number, what: number}} The cell under the pointer.
   */
  find(event) {
    const index = Math.floor(event.offsetY / this._pitch) * this._columns + Math.floor(event.offsetX / this._pitch);
    const isInside = event.offsetX < this._columns * this._pitch && index < this._cells.length;
    return isInside ? { index, what: this._cells[index] } : null;
  }

  /** Choose the largest squares that all fit. */
  _fit(width, height) {
    for (this._pitch = 22; this._pitch > 2; this._pitch -= 1) {
      this._columns = Math.max(1, Math.floor(width / this._pitch));
      if (Math.ceil(this._cells.length / this._columns) * this._pitch <= height) return;
    }
  }

  _nameColour(what, colourOf) {
    if (what >= 0) return colourOf(what);
    return { [FREE]: "free", [CACHED]: "cached" }[what] ?? "shared";
  }
}

/** Gives each running request a colour that it keeps while it runs. */
class ColourBook {
  constructor() {
    /** @type {Map<string, number>} */
    this._taken = new Map();
  }

  /**
   * Let go of those that have ended, and take in those that have come.
   * @param {string[]} ids Of all running requests.
   */
  update(ids) {
    const present = new Set(ids);
    for (const id of this._taken.keys()) if (!present.has(id)) this._taken.delete(id);
    const uses = Array(NUM_REQUEST_COLOURS).fill(0);
    for (const colour of this._taken.values()) uses[colour] += 1;
    for (const id of ids) {
      if (this._taken.has(id)) continue;
      const colour = uses.indexOf(Math.min(...uses));
      uses[colour] += 1;
      this._taken.set(id, colour);
    }
  }

  /**
   * @param {string} id
   * @returns {string} The colour's name.
   */
  name(id) {
    return `r${this._taken.get(id) ?? 0}`;
  }
}

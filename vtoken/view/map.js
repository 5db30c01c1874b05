/** The pool as a map: one cell per block, drawn pixel by pixel so that 50,000 of them take milliseconds. */

const LARGEST_CELL = 28;
const SMALLEST_CELL = 2;
/** From these sizes on, in CSS pixels, a cell has a frame and a pattern, and its owner's number. */
const FRAMED_CELL = 7;
const NUMBERED_CELL = 18;
/** Rows of pixels below which a filling says too little, so that the shade says it instead. */
const LEAST_ROWS = 5;
const EMPTY_SHARE = 0.24;

class BlockMap {
  /** @param choose called with a block's id when it is pointed at, tapped or reached by keys; null when left. */
  constructor(numBlocks, blockSize, label, choose) {
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.chosen = null;
    this._choose = choose;
    this.canvas = element("canvas", {
      class: "map",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "map of blocks",
      "aria-label": label,
    });
    this.canvas.addEventListener("pointermove", (event) => this._point(event));
    this.canvas.addEventListener("pointerdown", (event) => this._point(event));
    this.canvas.addEventListener("keydown", (event) => this._key(event));
    this.canvas.addEventListener("focus", () => {
      if (this.chosen === null && this.canvas.matches(":focus-visible")) this._set(1);
    });
  }

  /** Choose the size of cells for the room that there is. Returns whether it has changed. */
  fit(width) {
    const scale = window.devicePixelRatio || 1;
    const across = Math.floor(width * scale);
    const down = Math.min(460, Math.max(240, 0.75 * width)) * scale;
    const ideal = Math.sqrt((across * down) / this.numBlocks);
    let pitch = Math.floor(Math.min(LARGEST_CELL * scale, Math.max(SMALLEST_CELL * scale, ideal)));
    const columns = Math.min(this.numBlocks, Math.max(1, Math.floor(across / pitch)));
    pitch = Math.max(1, Math.min(Math.floor(across / columns), Math.floor(LARGEST_CELL * scale)));
    if (pitch === this.pitch && columns === this.columns && scale === this.scale) return false;
    Object.assign(this, { pitch, columns, scale, rows: Math.ceil(this.numBlocks / columns) });
    this.canvas.width = columns * pitch;
    this.canvas.height = this.rows * pitch;
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this._image = null;
    return true;
  }

  draw(occupancy, palette) {
    this._occupancy = occupancy;
    const context = this.canvas.getContext("2d");
    this._image ??= context.createImageData(this.canvas.width, this.canvas.height);
    const pixels = new Uint32Array(this._image.data.buffer);
    pixels.fill(pixel(palette.surface));
    this._pixels = pixels;
    this._tones(palette);
    const framed = this.pitch / this.scale >= FRAMED_CELL;
    for (let id = 1; id <= this.numBlocks; id++) this._cell(id, framed);
    context.putImageData(this._image, 0, 0);
    if (this.pitch / this.scale >= NUMBERED_CELL) this._numbers(context, palette);
    this._mark(context, palette);
  }

  // -- inside ---------------------------------------------------------------------------------------------------

  _tones(palette) {
    const tones = (colour) => ({
      full: pixel(colour),
      stripe: pixel(mix(colour, palette.surface, 0.7)),
      empty: pixel(mix(colour, palette.surface, EMPTY_SHARE)),
      edge: pixel(mix(colour, palette.ink, 0.72)),
      shades: Array.from({ length: 17 }, (_, n) =>
        pixel(mix(colour, palette.surface, EMPTY_SHARE + ((1 - EMPTY_SHARE) * n) / 16)),
      ),
    });
    this._owners = palette.owners.map(tones);
    this._shared = tones(palette.shared);
    this._free = pixel(palette.free);
    this._ink = pixel(palette.ink);
  }

  _cell(id, framed) {
    const { pitch } = this;
    const gap = framed ? Math.max(1, Math.round(this.scale)) : pitch >= 3 * this.scale ? 1 : 0;
    const size = pitch - gap;
    const x = ((id - 1) % this.columns) * pitch;
    const y = Math.floor((id - 1) / this.columns) * pitch;
    const first = this._occupancy.first[id];
    if (!first) {
      if (framed) this._frame(x, y, size, this._free);
      else this._rect(x + (size >> 1), y + (size >> 1), 1, 1, this._free);
      return;
    }
    const others = this._occupancy.others.get(id);
    const live = this._occupancy.live[id];
    const border = framed ? Math.max(1, Math.round(this.scale)) : 0;
    const inner = size - 2 * border;
    if (inner < LEAST_ROWS || !framed) {
      const tones = others ? this._shared : this._owners[first.owner.colour];
      this._rect(x, y, size, size, tones.shades[this._part(live, 16)]);
      return;
    }
    const everybody = others ? [first, ...others] : [first];
    const strips = Math.min(everybody.length, 4, inner);
    for (let n = 0; n < strips; n++) {
      const { owner } = everybody[n];
      const left = Math.floor((inner * n) / strips);
      const wide = Math.floor((inner * (n + 1)) / strips) - left;
      const filled = this._part(everybody[n].live, inner);
      const tones = this._owners[owner.colour];
      this._rect(x + border + left, y + border, wide, inner - filled, tones.empty);
      this._fill(x + border + left, y + border + inner - filled, wide, filled, tones, owner.pattern);
    }
    this._frame(x, y, size, others ? this._ink : this._owners[first.owner.colour].edge, border);
    if (others) this._corner(x, y, size);
  }

  /** How many of ``most`` pixels stand for so many live tokens: all only for a full block, none only for an empty one. */
  _part(live, most) {
    if (live <= 0) return 0;
    if (live >= this.blockSize) return most;
    return Math.min(most - 1, Math.max(1, Math.round((most * live) / this.blockSize)));
  }

  _rect(x, y, wide, high, colour) {
    const { width } = this.canvas;
    for (let row = y; row < y + high; row++) this._pixels.fill(colour, row * width + x, row * width + x + wide);
  }

  _fill(x, y, wide, high, tones, pattern) {
    this._rect(x, y, wide, high, tones.full);
    if (pattern === 0) return;
    const { width } = this.canvas;
    const step = Math.max(4, Math.round(4 * this.scale));
    for (let row = y; row < y + high; row++) {
      for (let column = x; column < x + wide; column++) {
        const along = (pattern === 1 ? row + column : pattern === 2 ? row : column) % step;
        if (along < step / 3) this._pixels[row * width + column] = tones.stripe;
      }
    }
  }

  _frame(x, y, size, colour, thick = Math.max(1, Math.round(this.scale))) {
    this._rect(x, y, size, thick, colour);
    this._rect(x, y + size - thick, size, thick, colour);
    this._rect(x, y, thick, size, colour);
    this._rect(x + size - thick, y, thick, size, colour);
  }

  /** What tells a shared block from others, whatever its colours: the upper right corner is of the text's colour. */
  _corner(x, y, size) {
    const reach = Math.max(3, Math.round(size / 3));
    for (let row = 0; row < reach; row++) this._rect(x + size - reach + row, y + row, reach - row, 1, this._ink);
  }

  _numbers(context, palette) {
    const size = this.pitch / this.scale;
    context.save();
    context.font = `600 ${Math.round(Math.min(12, size * 0.42) * this.scale)}px ${palette.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.lineWidth = 3 * this.scale;
    context.strokeStyle = palette.halo;
    context.fillStyle = palette.text;
    const middle = (this.pitch - Math.round(this.scale)) / 2;
    const widths = new Map();
    for (let id = 1; id <= this.numBlocks; id++) {
      const first = this._occupancy.first[id];
      if (!first || this._occupancy.others.has(id)) continue;
      const text = String(first.owner.number);
      if (!widths.has(text.length)) widths.set(text.length, context.measureText("0".repeat(text.length)).width);
      if (widths.get(text.length) > this.pitch - 6 * this.scale) continue;
      const x = ((id - 1) % this.columns) * this.pitch + middle;
      const y = Math.floor((id - 1) / this.columns) * this.pitch + middle + 0.5 * this.scale;
      context.strokeText(text, x, y);
      context.fillText(text, x, y);
    }
    context.restore();
  }

  _mark(context, palette) {
    if (this.chosen === null) return;
    const x = ((this.chosen - 1) % this.columns) * this.pitch;
    const y = Math.floor((this.chosen - 1) / this.columns) * this.pitch;
    const size = Math.max(this.pitch, 6 * this.scale);
    const wide = 2 * this.scale;
    context.lineWidth = 2 * wide;
    context.strokeStyle = palette.halo;
    context.strokeRect(x, y, size - this.scale, size - this.scale);
    context.lineWidth = wide;
    context.strokeStyle = palette.text;
    context.strokeRect(x, y, size - this.scale, size - this.scale);
  }

  _point(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - bounds.left) * this.scale) / this.pitch);
    const row = Math.floor(((event.clientY - bounds.top) * this.scale) / this.pitch);
    const id = row * this.columns + column + 1;
    const inside = column >= 0 && column < this.columns && row >= 0 && id <= this.numBlocks;
    if (inside && id !== this.chosen) this._set(id);
  }

  _key(event) {
    const at = this.chosen ?? 1;
    const goal = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at - this.columns,
      ArrowDown: at + this.columns,
      Home: 1,
      End: this.numBlocks,
    }[event.key];
    if (event.key === "Escape") this._set(null);
    else if (goal === undefined) return;
    else if (goal >= 1 && goal <= this.numBlocks) this._set(goal);
    event.preventDefault();
  }

  _set(id) {
    this.chosen = id;
    this._choose(id);
  }
}

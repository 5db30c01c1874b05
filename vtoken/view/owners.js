/** Who owns blocks: every request has a number, in the order in which they appear, and by it a colour and a pattern. */

const COLOURS = 7;
const PATTERNS = 4;

class Owners {
  constructor() {
    this._known = new Map();
    this._next = 1;
  }

  of(request) {
    let owner = this._known.get(request);
    if (!owner) {
      const number = this._next++;
      owner = {
        request,
        number,
        colour: (number - 1) % COLOURS,
        pattern: Math.floor((number - 1) / COLOURS) % PATTERNS,
      };
      this._known.set(request, owner);
    }
    return owner;
  }

  /** Forget whoever is in none of these frames. */
  keepOnly(frames) {
    const seen = new Set();
    for (const frame of frames) for (const { owner } of frame.holdings) seen.add(owner.request);
    for (const request of this._known.keys()) if (!seen.has(request)) this._known.delete(request);
  }
}

/** The colours of the scheme that is on, each as [red, green, blue]. */
class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => rgb(style.getPropertyValue(name).trim());
    this.surface = read("--surface");
    this.ink = read("--ink");
    this.free = read("--free");
    this.shared = read("--shared");
    this.owners = Array.from({ length: COLOURS }, (_, n) => read(`--owner-${n}`));
    this.text = style.getPropertyValue("--ink").trim();
    this.halo = style.getPropertyValue("--surface").trim();
    this.font = style.getPropertyValue("--font").trim();
  }
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** ``share`` of the first colour, the rest of the second. */
function mix(one, other, share) {
  return one.map((part, n) => Math.round(part * share + other[n] * (1 - share)));
}

/** As a pixel of an ImageData seen as 32-bit numbers, on the little-endian machines that browsers run on. */
function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

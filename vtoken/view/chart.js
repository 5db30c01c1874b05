/** A small line chart over time, drawn as SVG. */

const CHART = { height: 132, left: 46, right: 10, top: 8, bottom: 34 };

class LineChart {
  /**
   * @param title with the unit in it, as "Waste ratio F, %".
   * @param lines of which each has a name, and ``read(frame)``: a number, or null where there is none.
   */
  constructor(title, lines) {
    this.lines = lines;
    this.figure = element("figure", { class: "chart" });
    const caption = element("figcaption", {}, title);
    if (lines.length > 1) {
      for (const [n, line] of lines.entries()) {
        const sample = drawn("svg", { width: 26, height: 10, "aria-hidden": "true" });
        sample.append(drawn("path", { d: "M1 5H25", class: `line line-${n}` }));
        caption.append(element("span", { class: "sample" }, sample, line.name));
      }
    }
    this.image = drawn("svg", { role: "img", "aria-label": title });
    this.figure.append(caption, this.image);
  }

  /** The largest value of these frames. */
  most(frames) {
    let most = 0;
    for (const frame of frames) for (const line of this.lines) most = Math.max(most, line.read(frame) ?? 0);
    return most;
  }

  /**
   * @param frames those shown.
   * @param scale start and end, clock times; top, the largest value; live, whether times count back from the end.
   */
  draw(frames, scale, width) {
    const { height, left, right, top, bottom } = CHART;
    const upper = niceAbove(scale.top);
    const across = Math.max(1e-9, scale.end - scale.start);
    this._x = (clock) => left + ((width - left - right) * (clock - scale.start)) / across;
    const y = (value) => height - bottom - ((height - top - bottom) * value) / upper;
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * upper);
      parts.push(drawn("path", { d: `M${left} ${at}H${width - right}`, class: "grid" }));
      parts.push(label(left - 6, at + 4, short(share * upper), "end"));
    }
    for (const tick of timeTicks(scale, width)) {
      const at = this._x(tick.clock);
      parts.push(drawn("path", { d: `M${at} ${height - bottom}v4`, class: "grid" }));
      parts.push(label(at, height - bottom + 15, tick.text, "middle"));
    }
    const axis = scale.live ? "before the newest frame" : "since the first frame";
    parts.push(label((left + width - right) / 2, height - 4, axis, "middle"));
    for (const [n, line] of this.lines.entries()) {
      parts.push(drawn("path", { d: path(frames, line.read, this._x, y), class: `line line-${n}`, fill: "none" }));
    }
    this._cursor = drawn("path", { class: "cursor" });
    this.image.replaceChildren(...parts, this._cursor);
    this.image.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.image.setAttribute("width", width);
    this.image.setAttribute("height", height);
  }

  /** Show which time the rest of the page is about. */
  point(clock) {
    if (this._x) this._cursor.setAttribute("d", `M${this._x(clock).toFixed(1)} ${CHART.top}V${CHART.height - CHART.bottom}`);
  }
}

/** A polyline with a break wherever there is no value. */
function path(frames, read, x, y) {
  let text = "";
  let pen = "M";
  for (const frame of frames) {
    const value = read(frame);
    if (value === null) {
      pen = "M";
      continue;
    }
    text += `${pen}${x(frame.clock).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function label(x, y, text, anchor) {
  return drawn("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, text);
}

/** The smallest round number, twice a round one, that is not below. */
function niceAbove(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

function short(value) {
  if (value >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return String(+value.toFixed(2));
}

function timeTicks(scale, width) {
  const span = scale.end - scale.start;
  const wanted = Math.max(2, Math.floor(width / 64));
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200].find((s) => span / s <= wanted) ?? span;
  const ticks = [];
  for (let n = 0; n * step <= span + 1e-9; n++) {
    const text = step >= 60 ? `${+((n * step) / 60).toFixed(1)} min` : `${+(n * step).toFixed(3)} s`;
    ticks.push({ clock: scale.live ? scale.end - n * step : scale.start + n * step, text });
  }
  return ticks;
}

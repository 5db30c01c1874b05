/** One recording on the page: the map, the figures, the charts and the table of requests. */

const FIGURES = [
  ["waste", "waste ratio F", (frame) => percent(frame.waste)],
  ["held", "blocks held", (frame) => whole(frame.held)],
  ["free", "blocks free", (frame) => whole(frame.free)],
  ["running", "requests running", (frame) => whole(frame.running)],
  ["waiting", "requests waiting", (frame) => whole(frame.waiting)],
  ["evicted", "tokens evicted", (frame) => whole(frame.evicted)],
  ["moved", "tokens moved", (frame) => whole(frame.moved)],
  ["reclaimed", "blocks handed back", (frame) => whole(frame.reclaimed)],
];

const CHARTS = [
  ["waste", "Waste ratio F, %", [{ name: "F", read: (frame) => (frame.waste === null ? null : 100 * frame.waste) }]],
  ["held", "Blocks held", [{ name: "held", read: (frame) => frame.held }]],
  ["reclaimed", "Blocks handed back, total", [{ name: "handed back", read: (frame) => frame.reclaimed }]],
  [
    "requests",
    "Requests",
    [
      { name: "running", read: (frame) => frame.running },
      { name: "waiting", read: (frame) => frame.waiting },
    ],
  ],
];

const HINT = "Point at a block, tap it, or walk with the arrow keys, to see whose it is.";

class Panel {
  constructor(history, number) {
    this.history = history;
    this.charts = new Map(CHARTS.map(([key, title, lines]) => [key, new LineChart(title, lines)]));
    const size = `${count(history.numBlocks, "block")} of ${history.blockSize} tokens`;
    this.map = new BlockMap(history.numBlocks, history.blockSize, `${history.name}: ${size}`, () => this._tell(true));
    this._moment = element("p", { class: "moment" });
    this._place = element("div", { class: "place" }, this.map.canvas);
    this._line = element("p", { class: "told" });
    this._values = new Map(FIGURES.map(([key]) => [key, element("dd", { "data-figure": key })]));
    this._table = new RequestTable(history.blockSize, `${history.name}: requests that hold blocks`);
    const figures = FIGURES.map(([key, name]) => element("div", {}, element("dt", {}, name), this._values.get(key)));
    const heading = element("h2", { id: `recording-${number}` }, history.name);
    this.node = element(
      "section",
      { class: "panel", "aria-labelledby": heading.id },
      element("div", { class: "title" }, heading, this._moment),
      element("p", { class: "settings" }, `${size}; ${history.settings}`),
      this._place,
      this._line,
      element("dl", { class: "figures" }, ...figures),
      element("div", { class: "charts" }, ...Array.from(this.charts.values(), (chart) => chart.figure)),
      this._table.node,
    );
    this._tell(false);
  }

  /** Take up the width that there is. */
  fit() {
    return this.map.fit(this._place.clientWidth);
  }

  /** @param tops the largest value of each chart, by its key; scale as ``LineChart.draw`` has it. */
  drawCharts(tops, scale) {
    for (const [key, chart] of this.charts) {
      const width = chart.figure.clientWidth;
      if (width) chart.draw(this.history.frames, { ...scale, top: tops.get(key) }, width);
    }
  }

  /**
   * Show a frame.
   *
   * @param clock the time that the page is about; over is the sentence for a recording that has ended before, or "".
   */
  show(frame, clock, over, palette) {
    this._occupancy = new Occupancy(frame, this.history.numBlocks);
    this.map.draw(this._occupancy, palette);
    this._palette = palette;
    for (const [key, , read] of FIGURES) say(this._values.get(key), read(frame));
    for (const chart of this.charts.values()) chart.point(Math.min(clock, this.history.end));
    this._table.show(frame);
    say(this._moment, over);
    this._tell(false);
  }

  /** @param asked whether the user has just asked for it: only then is it read out. */
  _tell(asked) {
    if (asked && !this._occupancy) return;
    if (asked) this.map.draw(this._occupancy, this._palette);
    this._line.setAttribute("aria-live", asked ? "polite" : "off");
    say(this._line, this.map.chosen === null ? HINT : this._sentence(this.map.chosen));
  }

  _sentence(id) {
    const owners = this._occupancy.of(id);
    const size = this.history.blockSize;
    if (!owners.length) return `Block ${id}: free.`;
    const parts = owners.map(({ owner, live }) => `request ${owner.number} (${owner.request}), ${live} of ${size} tokens live`);
    if (owners.length > 1) return `Block ${id}, shared by ${owners.length}: ${parts.join("; ")}.`;
    const holes = size - owners[0].live;
    if (holes === 0) return `Block ${id}: ${parts[0]}, no hole.`;
    if (this._occupancy.last[id]) return `Block ${id}: ${parts[0]}; the request's last block, ${holes} slots empty.`;
    return `Block ${id}: ${parts[0]}, ${count(holes, "hole")}.`;
  }
}

/** The same as the map in words and numbers, by request. */
class RequestTable {
  constructor(blockSize, title) {
    this._blockSize = blockSize;
    this._rows = [];
    this._body = element("tbody");
    const heads = [
      ["no.", "number"],
      ["request", ""],
      ["blocks", "number"],
      ["live tokens", "number"],
      ["waste", "number"],
    ].map(([text, kind]) => element("th", { scope: "col", class: kind }, text));
    const table = element(
      "table",
      { class: "requests" },
      element("caption", {}, title),
      element("thead", {}, element("tr", {}, ...heads)),
      this._body,
    );
    this.node = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table);
  }

  show(frame) {
    const holdings = frame.holdings.filter((holding) => holding.blocks.length);
    holdings.sort((one, other) => one.owner.number - other.owner.number);
    while (this._rows.length > holdings.length) this._rows.pop().node.remove();
    while (this._rows.length < holdings.length) this._rows.push(this._row());
    for (const [n, { owner, blocks, live }] of holdings.entries()) {
      const row = this._rows[n];
      const tokens = live.reduce((sum, one) => sum + one, 0);
      row.swatch.setAttribute("class", `swatch owner-${owner.colour} pattern-${owner.pattern}`);
      const texts = [owner.number, owner.request, whole(blocks.length), whole(tokens)];
      texts.push(percent(1 - tokens / (blocks.length * this._blockSize)));
      for (const [place, text] of texts.entries()) say(row.cells[place], String(text));
    }
  }

  _row() {
    const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    const number = element("span");
    const request = element("th", { scope: "row" });
    const others = Array.from({ length: 3 }, () => element("td", { class: "number" }));
    const node = element("tr", {}, element("td", { class: "number" }, swatch, number), request, ...others);
    this._body.append(node);
    return { node, swatch, cells: [number, request, ...others] };
  }
}

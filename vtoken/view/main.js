/** The page: recordings in panels, one timeline for all of them, and frames that arrive where it is live. */

class Page {
  constructor(data) {
    this._live = data.live;
    this._owners = new Owners();
    this._panels = [];
    this._node = document.getElementById("recordings");
    this._palette = new Palette();
    this._problem = document.getElementById("problem");
    this._bar = document.getElementById("timeline");
    this._timeline = new Timeline(this._bar, data.live, (clock) => this._show(clock));
    this._width = this._node.clientWidth;
    new ResizeObserver(() => this._resized()).observe(this._node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this._recolour());
    this._appended = 0;
    for (const recording of data.recordings) this._add(recording);
    this._extend();
    document.querySelector(".reading").hidden = !this._live && !this._panels.length;
    if (!this._live && this._panels.length) this._timeline.go(Math.min(...this._panels.map((p) => p.history.end)) / 2);
    if (this._live) this._startPolling(data.interval);
  }

  // -- frames that arrive ---------------------------------------------------------------------------------------

  /** The engines of an answer to "since", as the server has them. Returns the numbers to ask from next, one for each. */
  take(engines, since) {
    this.problem("");
    if (engines.length !== this._panels.length || engines.some((engine, n) => this._isAnother(engine, n, since[n] ?? 0))) {
      if (since.some((number) => number > 0)) return [0]; // to have all frames of it
      this._clear();
      for (const engine of engines) this._add(engine);
    } else {
      for (const [n, engine] of engines.entries()) this._append(this._panels[n].history, engine.frames);
    }
    this._extend();
    if (!this._panels.some((panel) => !panel.history.empty)) {
      this.problem("No frame has been taken yet; the first one comes with the first request.");
      return [0];
    }
    return engines.map(({ frames }, n) => {
      const last = this._panels[n].history.newest?.number ?? 0;
      // Asked for once more where nothing new came: an engine that no longer has it is another one.
      const quiet = !frames.some((frame) => frame.number > (since[n] ?? 0));
      return quiet ? Math.max(0, last - 1) : last;
    });
  }

  /** A sentence about why nothing new is shown; "" where all is well. */
  problem(sentence) {
    const newest = this._panels.filter(({ history }) => !history.empty).map(({ history }) => history.end);
    const from = sentence && newest.length ? ` What is shown is from ${clockTime(Math.max(...newest))}.` : "";
    say(this._problem, sentence && `${sentence}${from}`);
    this._problem.hidden = !sentence;
  }

  /** @param wrong whether a key was given. */
  locked(wrong) {
    this.problem("");
    const form = document.getElementById("key");
    form.hidden = false;
    say(form.querySelector("p"), wrong ? "The server does not take this key." : "The server asks for its API key.");
    form.querySelector("input").focus();
  }

  // -- inside ---------------------------------------------------------------------------------------------------

  _startPolling(interval) {
    const poll = new Poll(this, interval);
    const form = document.getElementById("key");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const field = form.querySelector("input");
      form.hidden = true;
      poll.unlock(field.value);
      field.value = "";
    });
    poll.start();
  }

  /** Whether an answer cannot go on what is shown: the server was started again in between. */
  _isAnother(engine, n, since) {
    const { history } = this._panels[n];
    if (["name", "settings"].some((key) => engine[key] !== history[key])) return true;
    if (engine.block_size !== history.blockSize || engine.num_blocks !== history.numBlocks) return true;
    if (history.empty) return false;
    const { number, time, evicted } = history.newest;
    const [first] = engine.frames;
    if (!first) return since < number;
    const same = engine.frames.find((frame) => frame.number === number);
    return same ? same.time !== time : first.number <= number || first.tokens_evicted < evicted;
  }

  _append(history, frames) {
    const after = history.newest?.number ?? 0;
    const fresh = frames.filter((frame) => frame.number > after);
    history.append(fresh);
    this._appended += fresh.length;
    if (this._appended > MOST_FRAMES) {
      this._owners.keepOnly(this._panels.flatMap((panel) => panel.history.frames));
      this._appended = 0;
    }
  }

  _add(recording) {
    const panel = new Panel(new History(recording, this._owners, this._live), this._panels.length);
    this._panels.push(panel);
    this._node.append(panel.node);
  }

  _clear() {
    for (const panel of this._panels) panel.node.remove();
    this._panels = [];
    this._owners = new Owners();
  }

  /** There are other frames than before: the timeline and the charts have to reach over them. */
  _extend() {
    const shown = this._shown();
    this._bar.hidden = shown.length === 0;
    if (!shown.length) return;
    const start = Math.min(...shown.map(({ history }) => history.start));
    const end = Math.max(...shown.map(({ history }) => history.end));
    this._fit(start, end);
    this._timeline.range(start, end, Math.max(...shown.map(({ history }) => history.frames.length)));
  }

  /** Give maps and charts the room that there is; whoever calls this shows a frame then. */
  _fit(start, end) {
    const shown = this._shown();
    const scale = { start, end, live: this._live };
    const most = (key) => Math.max(...shown.map(({ history, charts }) => charts.get(key).most(history.frames)));
    const tops = new Map(CHARTS.map(([key]) => [key, most(key)]));
    for (const panel of shown) {
      panel.fit();
      panel.drawCharts(tops, scale);
    }
  }

  _resized() {
    if (this._node.clientWidth === this._width) return;
    this._width = this._node.clientWidth;
    this._fit(this._timeline.start, this._timeline.end);
    this._show(this._timeline.clock);
  }

  _shown() {
    return this._panels.filter((panel) => !panel.history.empty);
  }

  _show(clock) {
    for (const panel of this._shown()) {
      const { history } = panel;
      const ended = !this._live && clock > history.end + 1e-6;
      const over = ended ? `Ended after ${seconds(history.end)}; this is its last frame.` : "";
      panel.show(history.at(clock), clock, over, this._palette);
    }
  }

  _recolour() {
    this._palette = new Palette();
    this._show(this._timeline.clock);
  }
}

new Page(JSON.parse(document.getElementById("data").textContent));

/** Which time the page is about: a slider over all that is recorded, play and pause, and following the newest frame. */

/** Playing takes at most so many seconds from one end to the other, and never less than the time it shows. */
const LONGEST_PLAY = 30;

class Timeline {
  /** @param moved called with the time whenever it is another one. */
  constructor(node, live, moved) {
    this._live = live;
    this._moved = moved;
    this._slider = node.querySelector("input");
    this._shown = node.querySelector("output");
    this._play = node.querySelector(".play");
    this._follow = node.querySelector(".follow");
    this.following = live;
    this.clock = 0;
    this.start = 0;
    this.end = 0;
    this._timer = null;
    this._slider.addEventListener("input", () => this._slid());
    this._play.addEventListener("click", () => (this._timer === null ? this._begin() : this._pause()));
    this._follow.addEventListener("click", () => this.follow());
    this._follow.hidden = !live;
    this._buttons();
  }

  /**
   * The times that there are: in seconds, of day where the page is live.
   *
   * @param frames so many of them: an arrow key goes about as far as from one to the next.
   */
  range(start, end, frames) {
    Object.assign(this, { start, end });
    const apart = (end - start) / Math.max(1, frames - 1);
    const step = [5, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005].find((s) => s <= apart * 1.001) ?? 0.001;
    this._slider.min = start;
    this._slider.step = step;
    this._slider.max = start + Math.ceil((end - start) / step - 1e-9) * step;
    this.go(this.following ? end : this.clock);
  }

  go(clock) {
    this.clock = Math.min(this.end, Math.max(this.start, clock));
    this._slider.value = this.clock;
    const text = this._words();
    say(this._shown, text);
    this._slider.setAttribute("aria-valuetext", text);
    this._moved(this.clock);
  }

  follow() {
    this._pause();
    this.following = true;
    this._buttons();
    this.go(this.end);
  }

  // -- inside ---------------------------------------------------------------------------------------------------

  _slid() {
    this._pause();
    this.following = false;
    this._buttons();
    this.go(Number(this._slider.value));
  }

  _words() {
    if (!this._live) return `${seconds(this.clock, this.end)} of ${seconds(this.end)}`;
    const behind = this.end - this.clock;
    return behind < 0.0005 ? clockTime(this.clock) : `${clockTime(this.clock)}, ${seconds(behind)} ago`;
  }

  _begin() {
    this.following = false;
    if (this.clock >= this.end) this.go(this.start);
    const speed = Math.max(1, (this.end - this.start) / LONGEST_PLAY);
    let before = performance.now();
    const tick = (now) => {
      this.go(this.clock + (speed * (now - before)) / 1000);
      before = now;
      if (this.clock < this.end) this._timer = requestAnimationFrame(tick);
      else if (this._live) this.follow();
      else this._pause();
    };
    this._timer = requestAnimationFrame(tick);
    this._buttons();
  }

  _pause() {
    if (this._timer !== null) cancelAnimationFrame(this._timer);
    this._timer = null;
    this._buttons();
  }

  _buttons() {
    say(this._play, this._timer === null ? "Play" : "Pause");
    this._follow.setAttribute("aria-pressed", String(this.following));
  }
}

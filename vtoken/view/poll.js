/** Asking the server for frames, once per interval, and saying what is wrong where none come. */

const POOL = "v1/vtoken/pool"; // beside this page, whatever prefix the server has
const PATIENCE = 10000;
const KEY = "vtoken-api-key";

class Poll {
  /**
   * @param page has ``take(engines, since)``, which returns the numbers to ask from next, one for each engine; ``problem(sentence)``, "" for
   *     none; and ``locked(wrong)``, which asks the user for the key and calls ``unlock``.
   * @param interval seconds from one question to the next.
   */
  constructor(page, interval) {
    this._page = page;
    this._interval = 1000 * interval;
    this._since = [0];
    this._key = stored();
    this._offered = this._key !== null;
  }

  start() {
    this._ask();
  }

  /** Go on with this key. */
  unlock(key) {
    this._key = key;
    this._offered = true;
    this._ask();
  }

  async _ask() {
    const begun = performance.now();
    const again = await this._once();
    if (again) setTimeout(() => this._ask(), Math.max(0, this._interval - (performance.now() - begun)));
  }

  /** One question. Returns whether to ask again by itself. */
  async _once() {
    const headers = this._key === null ? {} : { Authorization: `Bearer ${this._key}` };
    const signal = AbortSignal.timeout(PATIENCE);
    let engines;
    try {
      const answer = await fetch(`${POOL}?${this._since.map((number) => `since=${number}`).join("&")}`, { headers, signal, cache: "no-store" });
      if (answer.status === 401) {
        this._page.locked(this._offered);
        return false;
      }
      if (!answer.ok) {
        this._page.problem(refusal(answer.status));
        return true;
      }
      ({ engines } = await answer.json());
    } catch {
      this._page.problem("The server does not answer.");
      return true;
    }
    if (this._key !== null) store(this._key);
    this._since = this._page.take(engines, this._since);
    return true;
  }
}

function refusal(status) {
  if (status === 404) return "This server has no pool to show: it runs without vtoken, or an older one.";
  return `The server answers with status ${status}.`;
}

/** Kept until the tab is closed, where the browser allows it. */
function store(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // It stays in memory.
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** The frames of one engine, the oldest first, in less room than they arrive in. */

const MOST_FRAMES = 1200;
/** Entries of holdings over all frames of a live page: the longest history of a pool of 50,000 blocks is 400 frames. */
const MOST_ENTRIES = 20e6;

class History {
  /**
   * @param recording as the server or the report has it.
   * @param owners a registry that the page's histories share.
   * @param live whether frames keep coming; clock times are then those of day, else seconds since the first frame.
   */
  constructor(recording, owners, live) {
    this.name = recording.name;
    this.settings = recording.settings;
    this.blockSize = recording.block_size;
    this.numBlocks = recording.num_blocks;
    this.frames = [];
    this._owners = owners;
    this._live = live;
    this._entries = 0;
    this._offset = live || !recording.frames.length ? 0 : recording.frames[0].time;
    this.append(recording.frames);
  }

  get empty() {
    return this.frames.length === 0;
  }

  get start() {
    return this.frames[0].clock;
  }

  get end() {
    return this.frames[this.frames.length - 1].clock;
  }

  get newest() {
    return this.frames[this.frames.length - 1];
  }

  append(frames) {
    for (const frame of frames) {
      const kept = this._compact(frame);
      this._entries += kept.entries;
      this.frames.push(kept);
    }
    if (!this._live) return;
    let leave = Math.max(0, this.frames.length - MOST_FRAMES);
    let entries = this._entries;
    for (let n = 0; n < leave; n++) entries -= this.frames[n].entries;
    while (entries > MOST_ENTRIES && leave < this.frames.length - 1) entries -= this.frames[leave++].entries;
    this.frames.splice(0, leave);
    this._entries = entries;
  }

  /** The last frame that is not after this time; before all of them, the first. */
  at(clock) {
    let low = 0;
    let high = this.frames.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].clock <= clock + 1e-6) low = middle;
      else high = middle;
    }
    return this.frames[low];
  }

  _compact(frame) {
    let entries = 0;
    const holdings = frame.holdings.map((holding) => {
      entries += holding.blocks.length;
      return {
        owner: this._owners.of(holding.request),
        blocks: Uint32Array.from(holding.blocks),
        live: Uint16Array.from(holding.live),
      };
    });
    const slots = frame.held_blocks * this.blockSize;
    return {
      number: frame.number,
      time: frame.time,
      clock: frame.time - this._offset,
      entries,
      holdings,
      waste: slots ? 1 - frame.live_tokens / slots : null,
      held: frame.held_blocks,
      free: this.numBlocks - frame.held_blocks,
      live: frame.live_tokens,
      dead: frame.dead_tokens,
      running: frame.running,
      waiting: frame.waiting,
      evicted: frame.tokens_evicted,
      moved: frame.tokens_moved,
      reclaimed: frame.blocks_reclaimed,
    };
  }
}

/**
 * Who owns each block of a frame: ``owners[id]`` is empty where it is free. ``live[id]`` is the most that one owner
 * attends; ``last[id]`` whether it is the end of an owner's blocks, where slots may not be used yet.
 */
class Occupancy {
  constructor(frame, numBlocks) {
    this.first = new Array(numBlocks + 1);
    this.others = new Map();
    this.live = new Uint16Array(numBlocks + 1);
    this.last = new Uint8Array(numBlocks + 1);
    for (const { owner, blocks, live } of frame.holdings) {
      for (let n = 0; n < blocks.length; n++) {
        const id = blocks[n];
        if (id > numBlocks) continue;
        const share = { owner, live: live[n] };
        if (!this.first[id]) this.first[id] = share;
        else if (this.others.has(id)) this.others.get(id).push(share);
        else this.others.set(id, [share]);
        if (live[n] > this.live[id]) this.live[id] = live[n];
        if (n === blocks.length - 1) this.last[id] = 1;
      }
    }
  }

  /** Its owners and the live tokens that each of them attends there. */
  of(id) {
    if (!this.first[id]) return [];
    return [this.first[id], ...(this.others.get(id) ?? [])];
  }
}

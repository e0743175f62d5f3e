// Recordings of the engine view: the last minutes, kept as they came, saved and played again.

import { merge } from "./live.js";

const KEPT_S = 600;
const LONGEST_GAP_S = 1;

/** The last ten minutes: a snapshot, and the merge patches after it. */
export class Recorder {
  constructor(seconds = KEPT_S) {
    this._seconds = seconds;
    this._first = null;
    this._changes = [];
  }

  /** Note what the server sent. isFirst: whether it is a whole snapshot, which begins anew. */
  add(data, isFirst) {
    if (isFirst || this._first === null) {
      this._first = data;
      this._changes = [];
      return;
    }
    this._changes.push(data);
    while (this._changes[0].at < data.at - this._seconds) this._first = merge(this._first, this._changes.shift());
  }

  /** Return the lines of a file, or null if nothing came. */
  get text() {
    if (this._first === null) return null;
    return [this._first, ...this._changes].map((each) => JSON.stringify(each)).join("\n") + "\n";
  }
}

/** Return the frames of a file, each a whole snapshot. Raises Error, with words for people. */
export function framesOf(text) {
  const frames = [];
  const lines = text.split("\n");
  for (const [i, line] of lines.entries()) {
    if (!line.trim()) continue;
    try {
      frames.push(merge(frames.at(-1) ?? null, JSON.parse(line)));
    } catch (error) {
      if (frames.length && i === lines.length - 1) break; // the server ended while it wrote
      throw new Error(`Line ${i + 1} of the recording is not JSON: ${error.message}`);
    }
  }
  const isOne = (frame) => Number.isFinite(frame.at) && frame.engine && frame.front && frame.status && frame.requests && frame.latency;
  if (!frames.length || !frames.every(isOne)) throw new Error("The file is not a recording from this page.");
  return frames;
}

/** Return the frames of an address of this server. load: returns the response of a path below it. */
export async function loadFrames(address, root, load) {
  const url = new URL(address, `${root}/ui`);
  if (!url.href.startsWith(`${root}/`)) throw new Error(`The recording is at ${url.origin}. Give an address of this server, such as ?replay=/recording.jsonl.`);
  return framesOf(await (await load(url.href.slice(root.length))).text());
}

/** Plays frames at their own pace; long gaps are cut. show: takes a frame and its number. */
export class Player {
  constructor(frames, show) {
    this.frames = frames;
    this._show = show;
    this._timer = null;
    this.at = 0;
  }

  get isPlaying() {
    return this._timer !== null;
  }

  /** Show a frame, and go on from it if it plays. */
  seek(number) {
    this.at = Math.max(0, Math.min(number, this.frames.length - 1));
    this._show(this.frames[this.at], this.at);
    if (this.isPlaying) this._wait();
  }

  play() {
    if (this.at === this.frames.length - 1) this.at = 0;
    this._wait();
    this._show(this.frames[this.at], this.at);
  }

  pause() {
    clearTimeout(this._timer);
    this._timer = null;
  }

  _wait() {
    clearTimeout(this._timer);
    const next = this.frames[this.at + 1];
    if (!next) {
      this._timer = null;
      return;
    }
    const gap = Math.min(next.at - this.frames[this.at].at, LONGEST_GAP_S);
    this._timer = setTimeout(() => {
      this.at += 1;
      this._wait();
      this._show(next, this.at);
    }, 1000 * Math.max(gap, 0));
  }
}

// Arithmetic of the engine view: merge patches, rates, percentiles and maps. No elements.

/** Apply a merge patch (RFC 7396): null deletes, objects are merged. */
export function merge(value, change) {
  if (change === null || typeof change !== "object" || Array.isArray(change)) return change;
  const found = value !== null && typeof value === "object" && !Array.isArray(value) ? { ...value } : {};
  for (const [name, each] of Object.entries(change)) {
    if (each === null) delete found[name];
    else found[name] = merge(found[name], each);
  }
  return found;
}

/** Return the value below which a share of a histogram lies, interpolated within its bucket; null
 * without values. bounds: upper bounds; there is one bucket more, above the last. */
export function percentile(bounds, counts, share) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] && left <= counts[i]) {
      const low = i ? bounds[i - 1] : 0;
      const high = bounds[Math.min(i, bounds.length - 1)];
      return low + (high - low) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return bounds.at(-1);
}

/** Return the runs of a map, "f12u3", as [letter, length]. */
export function runs(text) {
  return Array.from(text.matchAll(/([a-z])(\d+)/g), ([, letter, length]) => [letter, Number(length)]);
}

/** Return the runs of owners, "0x12,7x3", as [number, length]; numbers are keys of groups. */
export function ownerRuns(text) {
  return text ? text.split(",").map((run) => run.split("x")).map(([owner, length]) => [owner, Number(length)]) : [];
}

/** Return the value of one block in a map of states or of owners. */
export function valueAt(text, block) {
  let left = block;
  for (const [value, length] of text.includes("x") ? ownerRuns(text) : runs(text)) {
    if (left < length) return value;
    left -= length;
  }
  return null;
}

/** Return how many blocks are in each state. */
export function counts(text) {
  const found = { f: 0, c: 0, u: 0, s: 0, p: 0 };
  for (const [letter, length] of runs(text)) found[letter] += length;
  return found;
}

const RANK = "fcusp";

function spread(found) {
  const all = [];
  for (const [value, length] of found) for (let i = 0; i < length; i += 1) all.push(value);
  return all;
}

/** Return the owner of each cell: its first block's. each: blocks of a cell. */
export function cellOwners(text, each) {
  return spread(ownerRuns(text)).filter((_, i) => i % each === 0);
}

/** Return a letter for each cell of a map with at most `most` cells; a cell of several blocks has the
 * state of the busiest one. */
export function cells(text, most) {
  const letters = spread(runs(text));
  const each = Math.ceil(letters.length / most) || 1;
  if (each === 1) return { each, letters };
  const found = [];
  for (let i = 0; i < letters.length; i += each) found.push(letters.slice(i, i + each).reduce((one, other) => (RANK.indexOf(other) > RANK.indexOf(one) ? other : one)));
  return { each, letters: found };
}

const STEP_FIELDS = ["at", "decode", "prefill", "accepted", "wasted", "rows", "ms"];

/** The last steps of the engine, put together from snapshots, each of which has a few of them. */
export class Steps {
  constructor(most = 600) {
    this._most = most;
    this._known = new Map();
  }

  /** Add the steps of a snapshot. Those of a new core come after a restart and are later. */
  add(steps = {}) {
    for (const [key, row] of Object.entries(steps)) {
      if (this._known.get(key)?.at === row[0]) continue;
      this._known.delete(key);
      this._known.set(key, Object.fromEntries(STEP_FIELDS.map((name, i) => [name, row[i]])));
    }
    for (const key of this._known.keys()) {
      if (this._known.size <= this._most) break;
      this._known.delete(key);
    }
  }

  /** Return the steps, oldest first. */
  get all() {
    return [...this._known.values()].sort((one, other) => one.at - other.at);
  }
}

/** Return the tree of prefixes in the order of display: each with its depth. */
export function prefixRows(prefixes = []) {
  const below = new Map();
  prefixes.forEach((each, i) => below.set(each.parent, [...(below.get(each.parent) ?? []), i]));
  const rows = [];
  const visit = (parent, depth, before) => {
    const own = (below.get(parent) ?? []).sort((one, other) => weight(prefixes[other]) - weight(prefixes[one]));
    for (const i of own) {
      const { tokens, sequences, pins } = prefixes[i];
      rows.push({ ...prefixes[i], depth, saved: (tokens - before) * Math.max(0, sequences + pins - 1) });
      visit(i, depth + 1, tokens);
    }
  };
  visit(-1, 0, 0);
  return rows;
}

function weight({ tokens, sequences, pins }) {
  return tokens * (sequences + pins);
}

/** The last minute of readings. */
export class Ring {
  constructor(seconds = 60) {
    this._seconds = seconds;
    this.all = [];
  }

  /** Add a snapshot. A counter that fell belongs to a new core: values before it are dropped. */
  add(shown) {
    const engine = shown.engine;
    const made = {
      at: shown.at,
      out: shown.front.generation_tokens,
      in: engine.prompt_tokens_total,
      cached: engine.cached_tokens_total,
      steps: engine.steps_total,
      busy: engine.step_seconds_total,
      running: engine.num_running,
      waiting: engine.num_waiting,
      drafts: engine.draft_tokens_total,
      accepted: engine.accepted_drafts_total,
      latency: shown.latency,
    };
    const last = this.all.at(-1);
    if (last && (made.steps < last.steps || made.out < last.out || made.at <= last.at)) this.all = [];
    this.all.push(made);
    while (this.all.length > 2 && this.all[0].at < made.at - this._seconds) this.all.shift();
  }

  /** Return what a counter grew by in each second of the last `seconds`. */
  rate(name, seconds = 5) {
    const last = this.all.at(-1);
    const first = this.all.find((each) => each.at >= (last?.at ?? 0) - seconds);
    if (!first || first === last) return 0;
    return (last[name] - first[name]) / (last.at - first.at);
  }

  /** Return a histogram of the last minute; of all time if the minute had nothing. */
  histogram(name) {
    const last = this.all.at(-1)?.latency[name];
    const first = this.all[0]?.latency[name];
    if (!last) return { bounds: [], counts: [], isRecent: false };
    const recent = last.counts.map((count, i) => count - (first?.counts[i] ?? 0));
    const isRecent = recent.some((count) => count > 0);
    return { bounds: last.bounds, counts: isRecent ? recent : last.counts, isRecent };
  }

  /** Return steps of a quarter second: seconds ago, and what was done in it. */
  ticks() {
    const found = [];
    for (let i = 1; i < this.all.length; i += 1) {
      const [was, is] = [this.all[i - 1], this.all[i]];
      const prompt = Math.max(0, is.in - was.in - (is.cached - was.cached));
      const steps = is.steps - was.steps;
      found.push({ at: is.at, seconds: is.at - was.at, prompt, out: is.out - was.out, steps, stepMs: steps ? (1000 * (is.busy - was.busy)) / steps : 0 });
    }
    return found;
  }
}

/** Return the requests to show, at most `most`: all that compute, the oldest that wait, and the
 * last that ended. */
export function chosenRows(rows, most) {
  const newest = [...rows].sort((one, other) => other.at - one.at);
  const isOver = (row) => row.finished !== undefined;
  const running = newest.filter((row) => !isOver(row) && row.scheduled !== undefined);
  const waiting = newest.filter((row) => !isOver(row) && row.scheduled === undefined).reverse();
  const ended = newest.filter(isOver);
  const kept = Math.min(ended.length, Math.floor(most / 3));
  const open = [...running, ...waiting].slice(0, most - kept);
  return [...open, ...ended.slice(0, most - open.length)];
}

/** Return the phases of a request in milliseconds: name, begin and end. now: for open ones. */
export function phases(row, now) {
  const end = row.finished ?? Math.max(0, 1000 * (now - row.at));
  const marks = [
    ["render", 0, row.queued ?? row.rendered],
    ["wait", row.queued, row.scheduled],
    ["prefill", row.scheduled, row.first_token],
    ["decode", row.first_token, end],
  ];
  const found = [];
  for (const [name, from, to] of marks) {
    if (from === undefined || from === null) break;
    const until = Math.min(to ?? end, end);
    found.push({ name, from, to: Math.max(from, until) });
    if (to === undefined || to === null) break;
  }
  return found;
}

const WORDS = {
  render: "The server read the messages and made tokens of them",
  wait: "The request waited for its first step",
  prefill: "The engine computed the prompt",
  decode: "The engine wrote the answer",
};

/** Return a request's life in sentences, the longest phase named. */
export function explained(row, now) {
  const found = phases(row, now).map((phase) => ({ ...phase, ms: phase.to - phase.from }));
  const total = found.reduce((sum, { ms }) => sum + ms, 0);
  const longest = found.reduce((one, other) => (other.ms > (one?.ms ?? -1) ? other : one), null);
  return { phases: found.map((phase) => ({ ...phase, words: WORDS[phase.name], share: total ? phase.ms / total : 0 })), total, longest: longest?.name ?? null };
}

/** Return the rows of a plan: name, value and reason, as `quire plan` aligns them. */
export function planRows(text) {
  const [title = "", ...lines] = text.split("\n");
  const rows = lines.filter((line) => line.trim()).map((line) => {
    const parts = line.trim().split(/ {2,}/);
    return { name: parts[0], value: parts.length > 1 ? parts[1] : "", reason: parts.slice(2).join("  "), isInner: /^ {4}\S/.test(line) };
  });
  return { title, rows };
}

// The engine view: the stream of the server, drawn four times a second while somebody looks.

import { call, events, ROOT } from "./api.js";
import { BlockMap, nameOf } from "./blocks.js";
import { download, duration, fill, h, icon, number, toast, withButtons } from "./dom.js";
import { drawLine, drawSteps, forgetLook } from "./figures.js";
import { Player, Recorder, framesOf, loadFrames } from "./replay.js";
import { chosenRows, merge, percentile, phases, planRows, prefixRows, Ring, Steps } from "./live.js";

const RETRY_MS = 2000;
const WARM_FRAMES = 240;
const MAX_ROWS = 24;
const MAX_NAMED = 8;
const MAX_PREFIXES = 12;
const WORK = [
  ["phase-decode", "generated", "Tokens behind prompts; those that are computed again after a preemption count too."],
  ["part-accepted", "drafts accepted", "Guessed tokens that were right."],
  ["part-wasted", "drafts wasted", "Guessed tokens that were wrong."],
  ["phase-prefill", "of prompts", "Tokens of prompts that were computed; cached ones cost nothing."],
  ["part-ms", "time", "Milliseconds that the step took."],
];
const PHASES = [
  ["render", "reading the prompt"],
  ["wait", "waiting"],
  ["prefill", "computing the prompt"],
  ["decode", "writing"],
];
const NAMES = new Map([["render", "reading"], ["wait", "waiting"], ["prefill", "prompt"], ["decode", "writing"]]);
const FIGURES = [
  ["running", "Running", "Requests in progress. vllm:num_requests_running", ({ engine }) => number(engine.num_running)],
  ["waiting", "Waiting", "Requests that wait, in the engine or in front of it. vllm:num_requests_waiting", ({ engine, front }) => number(Math.max(engine.num_waiting, front.waiting_requests))],
  ["out", "Tokens/s out", "Tokens that were generated, over the last 5 s. vllm:generation_tokens_total", (_, ring) => rounded(ring.rate("out"))],
  ["ttft", "First token, p50 / p95 / p99", "Time to the first token: p50, p95 and p99 of the last minute. vllm:time_to_first_token_seconds", (_, ring) => shares(ring, "ttft", [0.5, 0.95, 0.99])],
  ["itl", "Between tokens, p50 / p95", "Time between tokens: p50 and p95 of the last minute. vllm:inter_token_latency_seconds", (_, ring) => shares(ring, "itl", [0.5, 0.95])],
  ["in", "Tokens/s in", "Prompt tokens that were admitted, cached ones included, over the last 5 s. vllm:prefix_cache_queries_total", (_, ring) => rounded(ring.rate("in"))],
  ["kv", "K/V in use", "Share of K/V blocks that sequences hold. vllm:kv_cache_usage_perc", ({ engine }) => percent(engine.num_used_blocks, engine.num_blocks)],
  ["hits", "Prefix hits", "Share of prompt tokens that were found in the cache since the start. vllm:prefix_cache_hits_total", ({ engine }) => percent(engine.cached_tokens_total, engine.prompt_tokens_total)],
  ["preempted", "Preempted", "Requests that lost their blocks. vllm:num_preemptions_total", ({ engine }) => number(engine.preempted_total)],
];

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

function rounded(value) {
  return number(value, value < 100 ? 1 : 0);
}

function shares(ring, name, wanted) {
  const { bounds, counts: found } = ring.histogram(name);
  const values = wanted.map((share) => percentile(bounds, found, share));
  if (values[0] === null) return "–";
  const isLong = values.at(-1) >= 1;
  const texts = values.map((value) => (isLong ? value.toFixed(value < 10 ? 2 : 1) : number(1000 * value, 1000 * value < 10 ? 2 : 0)));
  return `${texts.join(" / ")} ${isLong ? "s" : "ms"}`;
}

/** The view. showRequest: shows a request's timeline, by its row. */
export class EngineView {
  constructor(element, onState, showRequest) {
    this._element = element;
    this._onState = onState;
    this._showRequest = showRequest;
    this._ring = new Ring();
    this._recorder = new Recorder();
    this._player = null;
    this._shown = null;
    this._watching = null;
    this._static = "";
    this._steps = new Steps();
    this._map = new BlockMap((id) => this._pick(id));
    this._build();
    const again = () => {
      forgetLook();
      this._map.forget();
      this._stepsKey = "";
      this._draw();
    };
    window.addEventListener("resize", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }

  /** Show the request of an id, from its row if there is one. */
  _pick(id) {
    this._showRequest(Object.values(this._shown.requests).find((row) => row.id === id) ?? null, this._shown.at, id);
  }

  /** Return the last snapshot, or null. */
  get snapshot() {
    return this._shown;
  }

  /** Follow the server until `stop`. */
  async start() {
    if (this._watching) return;
    const watching = (this._watching = new AbortController());
    while (!watching.signal.aborted) {
      try {
        const response = await call("/ui/api/stream", { signal: watching.signal });
        let isFirst = true;
        for await (const data of events(response)) {
          this._take(JSON.parse(data), isFirst);
          isFirst = false;
        }
      } catch (error) {
        if (watching.signal.aborted) return;
        this._lose(error);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** Say that nothing new comes. */
  _lose({ status, message }) {
    const state = status === 503 ? "starting" : "unreachable";
    this._onState({ state, message });
    if (this._player) return;
    const old = this._live ? " What is below is as old as that." : "";
    this._banner.hidden = false;
    fill(this._banner, h("strong", {}, state === "starting" ? "The engine is starting. " : "The server is unreachable. "), message, ` The page asks again every ${RETRY_MS / 1000} s.${old}`);
  }

  stop() {
    this._watching?.abort();
    this._watching = null;
  }

  _take(data, isFirst) {
    this._recorder.add(data, isFirst);
    if (isFirst && !this._player) this._forget();
    this._live = isFirst ? data : merge(this._live, data);
    this._onState(this._live.status);
    if (!this._player) this._frame(this._live);
  }

  /** Begin anew: the numbers of another server's requests mean others. */
  _forget() {
    this._ring = new Ring();
    this._steps = new Steps();
    this._stepsKey = "";
    this._map.forget();
    fill(this._rows);
  }

  _frame(shown) {
    this._shown = shown;
    this._ring.add(shown);
    this._steps.add(shown.steps);
    this._draw();
  }

  _save() {
    const { text } = this._recorder;
    if (text === null) toast("The server has sent nothing yet.");
    else download("quire-engine.jsonl", text);
  }

  async _openRecording(file) {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    try {
      this._replay(framesOf(await chosen.text()));
    } catch (error) {
      toast(error.message);
    }
  }

  /** Show a recording of this server, and no engine. frame: number of the one to stand at; null to
   * play. */
  async replayFrom(address, frame) {
    this._onState({ state: "recording" });
    try {
      const frames = await loadFrames(address, ROOT, call);
      this._replay(frames, frame);
    } catch (error) {
      this._banner.hidden = false;
      fill(this._banner, h("strong", {}, "The recording cannot be played. "), error.message);
    }
  }

  /** Take in the minute before a frame, which rates and percentiles are of. */
  _warm(frames, number) {
    this._forget();
    for (const frame of frames.slice(Math.max(0, number - WARM_FRAMES), number)) {
      this._ring.add(frame);
      this._steps.add(frame.steps);
    }
  }

  /** Show a recording in place of the server, until it is closed. */
  _replay(frames, start = null) {
    this._player?.pause();
    this._forget();
    const slider = h("input", { type: "range", min: "0", max: String(frames.length - 1), value: "0", "aria-label": "Place in the recording" });
    const time = h("span", { class: "replay-time" });
    const button = h("button", { type: "button", class: "button" }, "Pause");
    const player = (this._player = new Player(frames, (frame, i) => {
      slider.value = String(i);
      setText(time, `${new Date(1000 * frame.at).toLocaleTimeString()} (${i + 1} of ${frames.length})`);
      setText(button, player.isPlaying ? "Pause" : "Play");
      this._frame(frame);
    }));
    const seek = (number) => {
      this._warm(frames, number);
      player.seek(number);
    };
    slider.addEventListener("input", () => seek(Number(slider.value)));
    button.addEventListener("click", () => {
      if (player.isPlaying) player.pause();
      else player.play();
      setText(button, player.isPlaying ? "Pause" : "Play");
    });
    const close = () => {
      player.pause();
      this._player = null;
      this._forget();
      this._replayBar.hidden = true;
      if (location.search) location.assign(location.pathname);
      if (this._live) this._frame(this._live);
    };
    fill(this._replayBar, h("strong", {}, "Recording"), button, slider, time, h("button", { type: "button", class: "button", onclick: close }, "Back to the engine"));
    this._replayBar.hidden = false;
    if (start === null) player.play();
    else seek(Math.min(start, frames.length - 1));
  }

  _build() {
    this._figures = new Map(FIGURES.map(([id]) => [id, h("span", { class: "figure-value", id: `figure-${id}` }, "–")]));
    this._line = h("canvas", { class: "spark", role: "img", "aria-label": "Tokens per second in the last minute" });
    const strip = h("div", { class: "figures-strip" }, FIGURES.map(([id, label, words]) => h("div", { class: `figure figure-${id}`, title: words, tabindex: "0" }, h("span", { class: "figure-label" }, label), this._figures.get(id), id === "out" ? this._line : null)));
    this._live = null;
    this._replayBar = h("div", { class: "replay", hidden: true });
    const file = h("input", { type: "file", accept: ".jsonl,application/json", class: "offscreen", tabindex: "-1", "aria-label": "File of a recording" });
    file.addEventListener("change", () => this._openRecording(file));
    const tools = h("div", { class: "row end" }, h("button", { type: "button", class: "button", title: "The last ten minutes of this page, saved to a file", onclick: () => this._save() }, icon("download"), "Save a recording"), h("button", { type: "button", class: "button", onclick: () => file.click() }, icon("upload"), "Open a recording"), file);
    this._banner = h("div", { class: "banner", hidden: true });
    this._bars = h("canvas", { class: "ticks", role: "img", "aria-label": "Tokens and time of the last steps" });
    this._bars.addEventListener("pointermove", (event) => this._pointAtStep(event.offsetX));
    this._bars.addEventListener("pointerleave", () => this._pointAtStep(null));
    this._pointedX = null;
    this._stepsNote = h("p", { class: "hint pointed" });
    this._waiting = h("ol", { class: "queue", "aria-label": "Waiting requests" });
    this._prefixes = h("ul", { class: "prefixes", "aria-label": "Shared prefixes" });
    this._rows = h("div", { class: "waterfall" });
    this._left = h("p", { class: "hint", hidden: true });
    this._queue = h("dl", { class: "facts" });
    this._cache = h("dl", { class: "facts" });
    this._parts = h("dl", { class: "facts" });
    this._boot = h("dl", { class: "facts" });
    this._plan = h("div", {});
    this._settings = h("dl", { class: "facts wide" });
    const phaseLegend = h("ul", { class: "legend" }, PHASES.map(([name, words]) => h("li", {}, h("span", { class: `swatch phase-${name}` }), words)));
    const workLegend = h("ul", { class: "legend" }, WORK.map(([name, words, title]) => h("li", { title }, h("span", { class: `swatch ${name}` }), words)));
    fill(
      this._element,
      this._replayBar,
      this._banner,
      strip,
      h("div", { class: "cards" }, card("K/V blocks", this._map.elements), card("Steps", this._bars, workLegend, this._stepsNote)),
      card("Requests", phaseLegend, this._rows, this._left),
      h("div", { class: "cards" }, card("Queue", this._queue, this._waiting), card("Shared prefixes", this._prefixes), card("Cache and drafts", this._cache), card("Model, adapters, processes", this._parts), card("Start", this._boot)),
      card("Plan", this._plan),
      card("Settings of the server", this._settings),
      tools,
    );
  }

  _draw() {
    const shown = this._shown;
    if (!shown || this._element.hidden) return;
    const { status } = shown;
    this._banner.hidden = status.state === "ready";
    if (!this._banner.hidden) fill(this._banner, h("strong", {}, `The engine is ${status.state}. `), status.message || "", bootLine(status));
    for (const [id, , , read] of FIGURES) setText(this._figures.get(id), read(shown, this._ring));
    drawLine(this._line, this._ring.ticks().map(({ out, seconds }) => out / seconds));
    this._map.show(shown);
    this._drawSteps();
    this._drawRequests(shown);
    this._drawFacts(shown);
    this._drawQueue(shown);
    this._drawPrefixes(shown);
  }

  _drawSteps() {
    const all = this._steps.all;
    const key = `${all.at(-1)?.at} ${all.length} ${this._bars.width} ${this._pointedX}`;
    if (key === this._stepsKey) return;
    const drawn = (this._drawn = drawSteps(this._bars, all));
    this._stepsKey = `${all.at(-1)?.at} ${all.length} ${this._bars.width} ${this._pointedX}`;
    if (this._pointedX !== null) return;
    const last = drawn.shown.at(-1);
    const most = this._shown.status.capacity?.max_num_batched_tokens;
    const timed = drawn.shown.filter(({ ms }) => ms > 0);
    const mean = timed.reduce((sum, { ms }) => sum + ms, 0) / timed.length;
    setText(this._stepsNote, last ? `A bar is a step, its height the root of its tokens. The largest has ${number(drawn.top)} tokens${most ? ` of ${number(most)} at most` : ""}.${timed.length ? ` They took ${duration(mean)} on average, ${duration(drawn.topMs)} at most.` : ""}` : "No step so far.");
  }

  /** Describe the step below the pointer; null: none. */
  _pointAtStep(x) {
    this._pointedX = x;
    const { shown = [], bar = 1 } = this._drawn ?? {};
    const step = x === null ? null : shown[shown.length - Math.ceil((this._bars.clientWidth - x) / bar)];
    if (!step) {
      this._pointedX = null;
      if (this._shown) this._drawSteps();
      return;
    }
    const drafts = step.accepted + step.wasted ? `, ${number(step.accepted)} of ${number(step.accepted + step.wasted)} drafts accepted` : "";
    setText(this._stepsNote, `${number(step.rows)} sequences: ${number(step.decode)} tokens generated, ${number(step.prefill)} of prompts${drafts}${step.ms ? `, in ${duration(step.ms)}` : ""}, at ${new Date(1000 * step.at).toLocaleTimeString()}.`);
  }

  _drawQueue({ groups = {}, hidden_groups: hidden = 0 }) {
    const reasons = new Map();
    for (const [key, { waits, tokens }] of Object.entries(groups)) {
      if (!waits) continue;
      if (!reasons.has(waits)) reasons.set(waits, []);
      reasons.get(waits).push(`${nameOf(groups, key)} (${number(tokens)} tokens)`);
    }
    const rows = [...reasons].map(([reason, names]) => `${number(names.length)} ${names.length === 1 ? "waits" : "wait"}: ${reason}. ${names.slice(0, MAX_NAMED).join(", ")}${names.length > MAX_NAMED ? `, and ${number(names.length - MAX_NAMED)} more` : ""}.`);
    if (hidden) rows.push(`${number(hidden)} more wait.`);
    const key = rows.join("\n");
    if (key === this._queueKey || this._waiting.contains(document.activeElement)) return; // a button under a finger stays
    this._queueKey = key;
    const names = Object.values(groups).map(({ id }) => id);
    fill(this._waiting, rows.map((row) => h("li", {}, withButtons(row, names, (id) => this._pick(id)))));
  }

  _drawPrefixes({ prefixes, groups }) {
    const rows = prefixRows(prefixes).slice(0, MAX_PREFIXES);
    const longest = Math.max(1, ...rows.map(({ tokens }) => tokens));
    const key = JSON.stringify(rows);
    if (key === this._prefixKey) return;
    this._prefixKey = key;
    if (!rows.length) fill(this._prefixes, h("li", {}, "No two sequences share blocks now, and no prefix is pinned."));
    else fill(this._prefixes, rows.map((row) => prefixElement(row, longest, groups)));
  }

  _drawRequests({ requests, at }) {
    const all = Object.values(requests);
    const rows = chosenRows(all, MAX_ROWS);
    const isOpen = (row) => row.finished === undefined;
    const numLeft = all.filter(isOpen).length - rows.filter(isOpen).length;
    setText(this._left, numLeft ? `${number(numLeft)} more ${numLeft === 1 ? "runs or waits" : "run or wait"}.` : "");
    this._left.hidden = !numLeft;
    if (!rows.length) {
      fill(this._rows, h("p", { class: "hint" }, "No requests yet. The requests of your key appear here while they run, and after they end."));
      return;
    }
    const old = new Map([...this._rows.children].map((each) => [each.dataset?.number, each]));
    const longest = Math.max(1, ...rows.map((row) => phases(row, at).at(-1)?.to ?? 0));
    const numbers = new Map(Object.entries(requests).map(([key, row]) => [row, key]));
    const made = rows.map((row) => this._row(row, numbers.get(row), at, old.get(numbers.get(row)), longest));
    if (made.some((each, i) => this._rows.children[i] !== each) || this._rows.children.length !== made.length) {
      const focused = document.activeElement;
      fill(this._rows, made);
      if (made.includes(focused)) focused.focus();
    }
  }

  /** Return the row of a request; the element that it has already, changed if it still runs. */
  _row(row, key, at, old, longest) {
    const isOver = row.finished !== undefined;
    if (isOver && old?.dataset.over === "true") {
      setStyle(old.children[1].firstChild, "width", width(row, at, longest));
      return old;
    }
    const element = old ?? this._newRow(row, key);
    const found = phases(row, at);
    const total = Math.max(found.at(-1)?.to ?? 0, 1);
    const [, bar, words, time, end] = element.children;
    const pieces = bar.firstChild;
    setStyle(pieces, "width", width(row, at, longest));
    if (pieces.children.length !== found.length) fill(pieces, found.map(({ name }) => h("span", { class: `phase phase-${name}` })));
    found.forEach(({ name, from, to }, i) => {
      setStyle(pieces.children[i], "flexGrow", ((to - from) / total).toFixed(4));
      pieces.children[i].title = `${name}: ${duration(to - from)}`;
    });
    element.dataset.over = String(isOver);
    setText(words, `${number(row.prompt)} in${row.cached ? ` (${number(row.cached)} cached)` : ""}, ${number(row.tokens)} out`);
    setText(time, duration(total));
    end.classList.toggle("bad", Boolean(row.error));
    setText(end, isOver ? (row.error ? "error" : (row.reason ?? "done")) : (NAMES.get(found.at(-1)?.name) ?? "arrived"));
    return element;
  }

  _newRow(row, key) {
    const pieces = h("span", { class: "request-bar" }, h("span", { class: "request-pieces" }));
    return h("button", { type: "button", class: "request", "data-number": key, onclick: () => this._showRequest(this._shown.requests[key] ?? row, this._shown.at), onpointerenter: () => this._map.highlight(row.id), onpointerleave: () => this._map.highlight(null), onfocus: () => this._map.highlight(row.id), onblur: () => this._map.highlight(null) }, h("span", { class: "request-id", title: row.id }, row.id), pieces, h("span", { class: "request-words" }), h("span", { class: "request-time" }), h("span", { class: "request-end" }));
  }

  _drawFacts(shown) {
    const { engine, front, status, model, server } = shown;
    const capacity = status.capacity ?? {};
    const waits = Object.values(shown.requests).filter((row) => row.finished === undefined && row.scheduled === undefined);
    facts(this._queue, [
      ["Waiting in the engine", number(engine.num_waiting), "They wait for room in the batch, or for K/V blocks."],
      ["Before their first step", `${number(front.waiting_requests)} requests, ${number(front.waiting_tokens)} tokens`],
      ["Longest wait", waits.length ? duration(Math.max(...waits.map((row) => 1000 * (shown.at - row.at)))) : "none"],
      ["Refused", `${number(Object.values(front.refused).reduce((sum, count) => sum + count, 0))} by the queue, ${number(engine.refused_total)} by the engine`],
      ["Rate of prefill", engine.prefill_tokens_per_s ? `${number(engine.prefill_tokens_per_s)} tokens/s` : "not measured yet"],
      ["Open HTTP requests", number(front.open_requests), "Viewers of this page included."],
    ]);
    const host = engine.num_host_blocks ? `${number(engine.num_used_host_blocks)} of ${number(engine.num_host_blocks)} blocks in use, ${number(engine.num_named_host_blocks)} with a prefix` : "none";
    const places = engine.accepted_drafts_at?.length ? ` (by place: ${engine.accepted_drafts_at.map((count) => number(count)).join(", ")})` : "";
    facts(this._cache, [
      ["Found in the cache", `${number(engine.cached_tokens_total)} of ${number(engine.prompt_tokens_total)} prompt tokens`],
      ["Host memory", host],
      ["Copied out, back, failed", `${number(engine.blocks_stored_total)}, ${number(engine.blocks_loaded_total)}, ${number(engine.blocks_unstored_total + engine.blocks_lost_total)} blocks`],
      ["Disk", engine.num_disk_blocks ? `${number(engine.num_named_disk_blocks)} of ${number(engine.num_disk_blocks)} blocks; ${number(engine.disk_read_seconds_total, 1)} s of reading, ${number(engine.disk_write_seconds_total, 1)} s of writing` : "none"],
      ["Swapped out, in", `${number(engine.swapped_out_total)}, ${number(engine.swapped_in_total)} requests`],
      ["Accepted drafts", engine.draft_tokens_total ? `${percent(engine.accepted_drafts_total, engine.draft_tokens_total)} of ${number(engine.draft_tokens_total)}${places}` : "no drafts"],
    ]);
    facts(this._parts, [
      ["Model", model ? model.names.join(", ") + (model.root ? ` (${model.root})` : "") : "loading"],
      ["Kernels", capacity.description || "–"],
      ["Context", capacity.max_model_len ? `${number(capacity.max_model_len)} tokens, ${number(capacity.capacity_tokens)} in the cache` : "–"],
      ["Batch", capacity.max_num_seqs ? `${number(capacity.max_num_seqs)} sequences, ${number(capacity.max_num_batched_tokens)} tokens in a step` : "–"],
      ["Adapters", model?.adapters.length ? `${model.adapters.join(", ")}; running: ${engine.running_adapters.join(", ") || "none"}` : "none"],
      ["Ranks", engine.rank_cpu_seconds.length ? engine.rank_cpu_seconds.map((seconds, i) => `${i}: ${number(seconds)} s of CPU, ${number(engine.rank_resident_bytes[i] / 2 ** 20)} MiB`).join("; ") : "one process"],
      ["Fronts", number(server.fronts)],
      ["Restarts of the engine", number(status.restarts)],
    ]);
    facts(this._boot, [...status.phases.map(({ name, seconds, is_done: isDone }) => [name, `${seconds.toFixed(2)} s${isDone ? "" : " …"}`]), ["Up", duration(1000 * (shown.at - server.started_at))], ["Version", server.version]]);
    const key = `${shown.plan}${JSON.stringify(shown.settings)}`;
    if (key === this._static) return;
    this._static = key;
    this._drawPlan(shown.plan);
    const settings = Object.entries(shown.settings);
    facts(this._settings, settings.length ? settings.map(([name, value]) => [name, Array.isArray(value) ? value.join(", ") || "–" : String(value) || "–"]) : [["Hidden", "The server has several keys."]]);
  }

  _drawPlan(text) {
    const { title, rows } = planRows(text);
    if (!text) fill(this._plan, h("p", { class: "hint" }, "The engine has not sent its plan yet."));
    else fill(this._plan, h("p", {}, title), h("div", { class: "table-box", tabindex: "0" }, h("table", { class: "plan" }, h("thead", {}, h("tr", {}, ["What", "Value", "Why"].map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row", class: row.isInner ? "inner" : "" }, row.name), h("td", { class: "value" }, row.value), h("td", {}, row.reason)))))));
  }
}

/** Return the width of a request's bar: it is as long as the request took, beside the others. */
function width(row, at, longest) {
  const took = phases(row, at).at(-1)?.to ?? 0;
  return `${Math.max(2, (100 * took) / longest).toFixed(1)}%`;
}

function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), children);
}

function bootLine(status) {
  const phase = status.phases.at(-1);
  return phase && !phase.is_done ? ` ${phase.name}, ${phase.seconds.toFixed(1)} s` : "";
}

/** Show names and values; only texts that changed are touched. */
function facts(list, rows) {
  if (list.children.length !== rows.length) fill(list, rows.map(([name, , words]) => h("div", words ? { title: words } : {}, h("dt", {}, name), h("dd", {}))));
  rows.forEach(([name, value], i) => {
    setText(list.children[i].firstChild, name);
    setText(list.children[i].lastChild, value);
  });
}

function prefixElement({ depth, tokens, sequences, pins, saved, groups: owners }, longest, groups) {
  const bar = h("span");
  bar.style.width = `${Math.max(1, (100 * tokens) / longest)}%`;
  const owned = [sequences && `${number(sequences)} ${sequences === 1 ? "sequence" : "sequences"}`, pins && `${number(pins)} ${pins === 1 ? "pin" : "pins"}`].filter(Boolean);
  const words = `${number(tokens)} tokens, ${owned.join(" and ")}`;
  const element = h("li", { title: owners.map((key) => nameOf(groups, String(key))).join(", ") }, h("span", { class: "prefix-words" }, h("span", {}, words), saved ? h("span", { class: "label" }, `${number(saved)} tokens kept once`) : null), h("span", { class: "prefix-bar" }, bar));
  element.style.paddingLeft = `${Math.min(depth, 6) * 14}px`;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setStyle(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}

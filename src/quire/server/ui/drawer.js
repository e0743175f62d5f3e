// The drawer with one request: the parts of its time, and its details.

import { call } from "./api.js";
import { duration, fill, h, iconButton, number, withButtons } from "./dom.js";
import { explained } from "./live.js";

/** Return the row of a timeline of /admin/requests, in the form of the stream. */
export function rowOf(timeline) {
  const row = { id: timeline.request_id, route: timeline.route, at: timeline.arrived_at, prompt: timeline.num_prompt_tokens, cached: timeline.num_cached_tokens, tokens: timeline.num_generation_tokens, reason: timeline.finish_reason, error: timeline.error };
  for (const name of ["rendered", "queued", "scheduled", "first_token", "finished"]) row[name] = timeline[`${name}_ms`] ?? undefined;
  return row;
}

/** Show a request. row: its row in the stream; null to ask for it by its id. */
export async function showRequest(id, row = null, now = Date.now() / 1000) {
  const drawer = document.getElementById("drawer");
  const path = `/admin/requests/${encodeURIComponent(id)}`;
  const isOpen = row !== null && row.finished === undefined;
  // It may still run, or be forgotten: then the row is what there is.
  const [timeline, explanation, fault] = await Promise.all([isOpen ? { found: null, fault: null } : read(path), read(`${path}/explanation`)]).then(
    ([one, other]) => [one.found, other.found, one.fault],
  );
  const shown = timeline ? rowOf(timeline) : row;
  const close = iconButton("close", "Close", () => drawer.close());
  const head = h("div", { class: "panel-head" }, h("h2", { id: "drawer-title" }, "Request"), close);
  if (!shown) fill(drawer, head, h("p", { class: "error" }, fault));
  else fill(drawer, head, h("p", { class: "mono request-name" }, shown.id), life(shown, now, explanation), isRefused(shown) ? null : why(explanation), details(shown, timeline));
  if (!drawer.open) drawer.showModal();
  close.focus();
}

async function read(path) {
  try {
    return { found: await (await call(path)).json(), fault: null };
  } catch (error) {
    return { found: null, fault: error.message };
  }
}

/** Return the ids of the requests that an explanation names. */
function namesIn(value) {
  if (value === null || typeof value !== "object") return [];
  return Object.entries(value).flatMap(([name, each]) => (["request_id", "compared"].includes(name) && typeof each === "string" ? [each] : namesIn(each)));
}

/** Return the server's own explanation: why the request was slow, and why its prompt was computed. */
function why(explanation) {
  if (!explanation) return null;
  const { sentences, cache_sentences: cache } = explanation;
  const lines = [...sentences.slice(1), ...cache]; // the first one repeats the bars
  return h("section", { "aria-label": "Why" }, h("h3", {}, "Why"), h("ul", { class: "why" }, lines.map((line) => h("li", {}, withButtons(line, namesIn(explanation), (id) => showRequest(id))))));
}

function isRefused(row) {
  return Boolean(row.error) && row.scheduled === undefined;
}

/** Return whether a request waited most for a place in the batch or for blocks. */
function lacksRoom(explanation) {
  const waits = Object.entries(explanation?.engine?.[0]?.waits ?? {}).sort(([, one], [, other]) => other - one);
  return ["places", "blocks"].includes(waits[0]?.[0]);
}

function life(row, now, explanation) {
  const { phases, total, longest } = explained(row, now);
  const lines = phases.map(({ name, ms, share, words }) => {
    const bar = h("span", { class: `phase phase-${name}` });
    bar.style.width = `${Math.max(1, 100 * share)}%`;
    return h("li", { class: name === longest ? "longest" : "" }, h("span", { class: "life-words" }, words, h("span", { class: "life-time" }, `${duration(ms)}, ${(100 * share).toFixed(0)} %`)), h("span", { class: "life-bar" }, bar));
  });
  const took = row.finished === undefined ? `It has run for ${duration(total)}.` : `It took ${duration(total)}.`;
  const words = isRefused(row) ? h("p", { class: "error" }, `It ended before its first step. ${row.error}`) : h("p", {}, took, " ", advice(phases, longest, explanation));
  return h("div", {}, words, h("ol", { class: "life" }, lines));
}

const ADVICE = {
  render: "went into reading the messages. Long prompts take longer.",
  wait: "was waiting for the first step.",
  room: "was waiting for room. A larger max_num_seqs or a larger K/V cache lets more run at once.",
  prefill: "was the prompt. If the next prompt begins the same way, the cache has that part.",
  decode: "was writing tokens, one after the other.",
};

/** Return what took longest, and what helps. */
function advice(phases, longest, explanation) {
  if (longest === null) return "";
  const isMost = phases.some(({ name, share }) => name === longest && share >= 0.5);
  const kind = longest === "wait" && lacksRoom(explanation) ? "room" : longest;
  return `${isMost ? "Most of it" : "The largest part"} ${ADVICE[kind]}`;
}

function details(row, timeline) {
  const facts = [
    ["Route", row.route],
    ["Arrived", new Date(1000 * row.at).toLocaleTimeString()],
    ["Prompt", `${number(row.prompt)} tokens, ${number(row.cached)} found in the cache`],
    ["Answer", `${number(row.tokens)} tokens${timeline ? ` in ${number(timeline.num_chunks)} pieces` : ""}`],
    ["End", row.error ?? row.reason ?? "still running"],
  ];
  const decodeMs = row.finished !== undefined && row.first_token !== undefined && row.tokens > 1 ? (row.finished - row.first_token) / (row.tokens - 1) : null;
  if (decodeMs) facts.push(["Time per token", duration(decodeMs)]);
  for (const [name, label] of [["dropped_keywords", "Schema keywords without effect"], ["removed_lines", "Lines left out of the system prompt"], ["ignored", "Without effect"]]) if (timeline?.[name]) facts.push([label, timeline[name].join(", ")]);
  return h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

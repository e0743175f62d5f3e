// Tests of the page's modules that need no browser: node --test tests/server/page_modules.mjs

import assert from "node:assert/strict";
import { test } from "node:test";

const UI = new URL("../../src/quire/server/ui/", import.meta.url);
const [{ inline, parse, visible }, live, { faultOf }, talks, { Answer, endWords, requestBody, speedOf }, { asCurl, asPython, python }, replay] = await Promise.all(["chat/markdown", "live", "chat/schema", "chat/conversations", "chat/answer", "chat/snippets", "replay"].map((name) => import(new URL(`${name}.js`, UI))));

/** Return all strings of a tree. */
function texts(piece) {
  if (typeof piece === "string") return [piece];
  return Object.values(piece ?? {}).flatMap((each) => (typeof each === "object" || typeof each === "string" ? texts(each) : []));
}

test("blocks", () => {
  const kinds = (text) => parse(text).map(({ kind }) => kind);
  assert.deepEqual(kinds("# a\n\nb\nc\n\n- d\n- e\n\n1. f\n\n> g\n\n---\n\n```py\nh\n```"), ["heading", "paragraph", "list", "list", "quote", "rule", "code"]);
  const [code] = parse("```py\nfor x in y:\n    # not a heading\n");
  assert.deepEqual(code, { kind: "code", language: "py", text: "for x in y:\n    # not a heading\n" });
  const [table] = parse("| a | b |\n|---|--:|\n| 1 | **2** |");
  assert.deepEqual(table.aligns, ["left", "right"]);
  assert.deepEqual(table.rows, [[["1"], [{ kind: "strong", parts: ["2"] }]]]);
  const columns = Array.from({ length: 9 }, () => "**c**");
  const [wide] = parse(`|${columns.join("|")}|\n${"|-".repeat(9)}|`);
  assert.deepEqual(new Set(wide.head.map(([{ kind }]) => kind)), new Set(["strong"]));
  assert.deepEqual(["# a ##", "# a#", "# #", "## a # b #  "].map((text) => parse(text)[0].parts), [["a"], ["a#"], ["#"], ["a # b"]]);
  const [list] = parse("1. one\n   more\n2. two\n   - inner\n");
  assert.equal(list.items.length, 2);
  assert.deepEqual(list.items[1].map(({ kind }) => kind), ["paragraph", "list"]);
});

test("an element takes any number of children", async () => {
  const element = () => ({ children: [], append(...given) { this.children.push(...given); }, replaceChildren(...given) { this.children = given; }, setAttribute() {} });
  globalThis.document = { createElement: element };
  const { fill, h } = await import(new URL("dom.js", UI));
  const many = Array.from({ length: 600_000 }, () => "a");
  assert.equal(h("p", {}, many).children.length, many.length);
  assert.equal(fill(h("p", {}, "old"), many, null, "b").children.length, many.length + 1);
});

test("names in a text become buttons, the longest first", async () => {
  const element = () => ({ children: [], append(...given) { this.children.push(...given); }, setAttribute() {}, addEventListener(_, call) { this.click = call; } });
  globalThis.document = { createElement: element };
  const { withButtons } = await import(new URL("dom.js", UI));
  const picked = [];
  const parts = withButtons("behind a.b and a.bc, not axb", ["a.b", "a.bc", "a.b", ""], (id) => picked.push(id));
  assert.deepEqual(parts.filter((each) => typeof each === "string"), ["behind ", " and ", ", not axb"]);
  parts.filter((each) => typeof each !== "string").forEach((each) => each.click());
  assert.deepEqual(picked, ["a.b", "a.bc"]);
  assert.deepEqual(withButtons("none", [], null), ["none"]);
});

test("parts of lines", () => {
  assert.deepEqual(inline("a *b* **c** ***d*** ~~e~~ `f*g*`"), ["a ", { kind: "em", parts: ["b"] }, " ", { kind: "strong", parts: ["c"] }, " ", { kind: "strong", parts: [{ kind: "em", parts: ["d"] }] }, " ", { kind: "strike", parts: ["e"] }, " ", { kind: "codeSpan", text: "f*g*" }]);
  assert.deepEqual(texts(inline("2 * 3 * 4, snake_case_name, *open")).join(""), "2 * 3 * 4, snake_case_name, *open");
  assert.deepEqual(inline("*a **b** c*"), [{ kind: "em", parts: ["a ", { kind: "strong", parts: ["b"] }, " c"] }]);
  assert.deepEqual(inline("[quire](https://example.org/a) and https://example.org/b."), [{ kind: "link", address: "https://example.org/a", parts: ["quire"] }, " and ", { kind: "link", address: "https://example.org/b", parts: ["https://example.org/b"] }, "."]);
});

test("hostile texts stay texts", () => {
  for (const address of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", " javascript:x", "\tjavascript:x", "//evil.example", "java\nscript:x"]) {
    const found = JSON.stringify(parse(`[click](${address}) ![img](${address})`));
    assert.ok(!found.includes('"link"'), address);
  }
  const text = '<script>alert(1)</script><img src=x onerror="alert(1)">';
  assert.equal(texts(parse(text)[0].parts).join(""), text);
  assert.equal(visible("\u001b[31mred\u0007\u202egnp\u2066\u0085"), "␛[31mred␇[U+202E]gnp[U+2066][U+0085]");
  assert.equal(visible("a\tb\nc"), "a\tb\nc");
});

test("no text takes long", () => {
  // In quadratic time these texts take minutes, and the caller gives up.
  const hostile = ["*", "_", "~~", "`", "``` ", "[", "![", "[](", "*a ", "_a_b", "**a* ", "`a``b", "https://", "\\", "<", "|", "> ", "- ", "1. ", "| - ", "# ", "\n", "* * *\n", "| a |\n| - |\n", "x"];
  for (const piece of hostile) assert.ok(parse(piece.repeat(Math.ceil(400_000 / piece.length))).length < 400_001);
  assert.deepEqual(parse(`# a${" ".repeat(400_000)}b ##`)[0].parts.at(-1).slice(-2), " b");
  const [table] = parse(`${"|a".repeat(999)}|\n${"|-".repeat(999)}|\n${"|\n".repeat(100_000)}`);
  assert.equal(table.rows.length, 100_000);
  assert.ok(table.rows.every((row) => row.length === 1), "a short row gets no cells that nobody wrote");
});

test("merge patches", () => {
  assert.deepEqual(live.merge({ a: 1, b: { c: 1, d: 2 } }, { a: null, b: { c: 3 }, e: [1] }), { b: { c: 3, d: 2 }, e: [1] });
});

test("percentiles lie within buckets", () => {
  const bounds = [1, 2, 4];
  assert.equal(live.percentile(bounds, [0, 0, 0, 0], 0.5), null);
  assert.equal(live.percentile(bounds, [0, 10, 0, 0], 0.5), 1.5);
  assert.equal(live.percentile(bounds, [1, 1, 1, 0], 1), 4);
  assert.equal(live.percentile(bounds, [0, 0, 0, 5], 0.5), 4, "nothing is known above the last bound");
});

test("maps of blocks", () => {
  assert.deepEqual(live.counts("f2u3c1f1"), { f: 3, c: 1, u: 3, s: 0, p: 0 });
  assert.deepEqual(live.cells("f2u3c1f1", 10), { each: 1, letters: [..."ffuuucf"] });
  assert.deepEqual(live.cells("f2u3c1f1", 4), { each: 2, letters: [..."fuuf"] });
});

test("rates, and a new core", () => {
  const ring = new live.Ring(60);
  const at = (seconds, out, steps) => ({ at: seconds, front: { generation_tokens: out }, engine: { prompt_tokens_total: out, cached_tokens_total: 0, steps_total: steps, step_seconds_total: steps / 100 }, latency: { ttft: { bounds: [1], counts: [steps, 0] } } });
  [0, 1, 2, 3].forEach((each) => ring.add(at(each, 10 * each, each)));
  assert.equal(ring.rate("out", 5), 10);
  assert.deepEqual(ring.histogram("ttft").counts, [3, 0]);
  assert.equal(ring.ticks()[0].stepMs, 10);
  ring.add(at(4, 30, 0));
  assert.equal(ring.rate("out"), 0);
});

test("the phases of a request", () => {
  const row = { at: 100, rendered: 5, queued: 6, scheduled: 500, first_token: 600, finished: 700 };
  const told = live.explained(row, 200);
  assert.equal(told.longest, "wait");
  assert.equal(told.total, 700);
  const open = live.phases({ at: 100, rendered: 5, queued: 6 }, 101);
  assert.deepEqual(open, [{ name: "render", from: 0, to: 6 }, { name: "wait", from: 6, to: 1000 }]);
});

test("a plan has rows", () => {
  const { title, rows } = live.planRows("Llama, 1 M parameters\n  device       cpu  no GPU\n  memory\n    weights  1 MiB  in bfloat16");
  assert.equal(title, "Llama, 1 M parameters");
  assert.deepEqual(rows.map(({ name, value, reason, isInner }) => [name, value, reason, isInner]), [["device", "cpu", "no GPU", false], ["memory", "", "", false], ["weights", "1 MiB", "in bfloat16", true]]);
});

test("schemas", () => {
  const schema = { type: "object", properties: { name: { type: "string", minLength: 1 }, year: { type: "integer", minimum: 0 }, tags: { type: "array", items: { $ref: "#/$defs/tag" }, maxItems: 2 } }, required: ["name"], additionalProperties: false, $defs: { tag: { enum: ["a", "b"] } } };
  assert.equal(faultOf({ name: "x", year: 3, tags: ["a"] }, schema), null);
  for (const [value, words] of [[[], "not of type"], [{}, "answer.name is missing"], [{ name: "" }, "fewer than 1"], [{ name: "x", year: 1.5 }, "not of type integer"], [{ name: "x", year: -1 }, "below 0"], [{ name: "x", other: 1 }, "not in the schema"], [{ name: "x", tags: ["c"] }, "none of"], [{ name: "x", tags: ["a", "a", "a"] }, "more than 2"]]) assert.match(faultOf(value, schema) ?? "", new RegExp(words));
  assert.equal(faultOf(1, { anyOf: [{ type: "string" }, { type: "number" }] }), null);
  assert.match(faultOf(1, { oneOf: [{ type: "integer" }, { type: "number" }] }), /fits 2/);
  assert.match(faultOf({}, { $ref: "#" }) ?? "", /^$/, "a schema of itself ends");
});

test("branches", () => {
  const talk = talks.newConversation({ system: "Be brief." });
  const first = talks.add(talk, { role: "user", content: "one" });
  const answer = talks.add(talk, { role: "assistant", content: "1" });
  const again = talks.add(talk, { role: "assistant", content: "uno" }, first.id);
  assert.deepEqual(talks.path(talk).map(({ content }) => content), ["one", "uno"]);
  assert.deepEqual(talks.siblings(talk, answer).map(({ id }) => id), [answer.id, again.id]);
  talks.add(talk, { role: "user", content: "two" }, answer.id);
  talks.select(talk, again.id);
  assert.equal(talk.last, again.id);
  talks.select(talk, answer.id);
  assert.deepEqual(talks.asMessages(talk).map(({ content }) => content), ["Be brief.", "one", "1", "two"]);
  talks.add(talk, { role: "assistant", content: "", failed: true });
  assert.equal(talks.asMessages(talk).length, 4, "an answer that never came is not sent");
  assert.deepEqual(talks.fromFile(talks.toFile([talk])), [talk]);
  assert.throws(() => talks.fromFile('{"a": 1}'), /no conversations/);
  assert.throws(() => talks.fromFile("{"), /not JSON/);
});

test("a conversation that would break the page is not taken", () => {
  const talk = talks.newConversation();
  const first = talks.add(talk, { role: "user", content: "a" });
  const last = talks.add(talk, { role: "assistant", content: "b", calls: [] });
  const faults = { ring: [first, { parent: last.id }], stray: [last, { parent: "constructor" }], calls: [last, { calls: {} }], call: [last, { calls: [null] }], thought: [last, { reasoning: 1 }], id: [last, { id: first.id }] };
  for (const [name, [message, change]] of Object.entries(faults)) {
    const bad = { ...talk, id: name, messages: { ...talk.messages, [message.id]: { ...message, ...change } } };
    assert.throws(() => talks.fromFile(talks.toFile([bad])), /no conversations/, name);
    const store = new talks.ConversationStore({ getItem: () => talks.toFile([bad, talk]) });
    assert.deepEqual(store.all.map(({ id }) => id), [talk.id], "the others stay");
  }
});

test("two tabs lose nothing of each other", () => {
  const storage = { text: null, getItem() { return this.text; }, setItem(_, text) { this.text = text; }, removeItem() { this.text = null; } };
  const begun = talks.newConversation();
  const first = talks.add(begun, { role: "user", content: "both" });
  storage.text = talks.toFile([begun]);
  const [one, other] = [new talks.ConversationStore(storage), new talks.ConversationStore(storage)];
  const made = talks.newConversation();
  talks.add(made, { role: "user", content: "in one tab" });
  one.all.push(made);
  const branch = talks.add(one.all.find(({ id }) => id === begun.id), { role: "assistant", content: "one", calls: [] });
  one.save();
  const reply = talks.add(other.all[0], { role: "assistant", content: "other", calls: [] });
  other.save();
  const third = new talks.ConversationStore(storage);
  assert.deepEqual(new Set(third.all.map(({ id }) => id)), new Set([begun.id, made.id]));
  assert.deepEqual(new Set(Object.keys(third.all.find(({ id }) => id === begun.id).messages)), new Set([first.id, branch.id, reply.id]));
  other.remove(made.id);
  other.save();
  assert.deepEqual(new talks.ConversationStore(storage).all.map(({ id }) => id), [begun.id]);
  other.remove(begun.id);
  assert.equal(storage.text, null);
});

test("a store without room drops the oldest", () => {
  const kept = new Map();
  const storage = { getItem: (name) => kept.get(name) ?? null, removeItem: (name) => kept.delete(name), setItem: (name, text) => { if (text.length > 3000) throw new Error("quota"); kept.set(name, text); } };
  const store = new talks.ConversationStore(storage);
  for (let i = 0; i < 20; i += 1) {
    const talk = talks.newConversation();
    talks.add(talk, { role: "user", content: `number ${i} ${"x".repeat(200)}`, tokens: [{ text: "big" }] });
    talk.at = i;
    store.all.push(talk);
  }
  assert.equal(store.save(), false);
  const left = new talks.ConversationStore(storage).all;
  assert.ok(left.length > 0 && left.length < 20 && left[0].title.startsWith("number 19"));
  assert.ok(!JSON.stringify(left).includes('"big"'));
});

test("an answer in pieces", () => {
  let clock = 0;
  const message = {};
  const answer = new Answer(message, () => clock);
  const send = (delta, more = {}) => answer.take(JSON.stringify({ choices: [{ delta, ...more }] }));
  send({ role: "assistant", content: "" });
  clock = 100;
  send({ reasoning_content: "hm" });
  clock = 300;
  send({ reasoning_content: "m" });
  send({ content: "Hi" }, { logprobs: { content: [{ token: "Hi", logprob: -0.1, top_logprobs: [{ token: "Ho", logprob: -2 }] }] } });
  send({ tool_calls: [{ index: 0, id: "c1", function: { name: "f", arguments: "" } }] });
  send({ tool_calls: [{ index: 0, function: { arguments: '{"a":1}' } }] });
  send({}, { finish_reason: "tool_calls" });
  answer.take(JSON.stringify({ choices: [], usage: { prompt_tokens: 3, completion_tokens: 5 } }));
  answer.take("[DONE]");
  clock = 1100;
  answer.finish();
  assert.equal(message.reasoning, "hmm");
  assert.equal(message.thoughtMs, 200);
  assert.deepEqual(message.calls, [{ id: "c1", name: "f", arguments: '{"a":1}' }]);
  assert.deepEqual(message.tokens, [{ text: "Hi", logprob: -0.1, top: [["Ho", -2]] }]);
  assert.equal(message.firstMs, 100);
  assert.equal(speedOf(message), 4);
  assert.equal(speedOf({ ...message, totalMs: 101 }), null, "all came at once: the engine has no such speed");
  assert.equal(endWords({ ...message, error: "The engine stopped." }), "The engine stopped.");
});

test("bodies and what is copied", () => {
  const talk = talks.newConversation({ temperature: "0.5", seed: "", stop: "END\n\\n", schema: '{"type": "object"}', logprobs: true });
  talks.add(talk, { role: "user", content: "it's" });
  const body = requestBody(talk, "m");
  assert.deepEqual([body.temperature, body.seed, body.stop, body.top_logprobs], [0.5, undefined, ["END", "\n"], 5]);
  assert.throws(() => requestBody({ ...talk, settings: { tools: "[" } }, "m"), /Tools must be JSON/);
  for (const schema of ['{"type": "banana"}', '{"properties": {"a": {"anyOf": [{"type": ["null", "banana"]}]}}}']) assert.throws(() => requestBody({ ...talk, settings: { schema } }, "m"), /the type "banana"/);
  for (const schema of ['{"properties": {"type": {"type": "string"}, "enum": {}}}', '{"const": {"type": "banana"}}', "true"]) assert.ok(requestBody({ ...talk, settings: { schema } }, "m").response_format);
  assert.match(asCurl("http://h", body, true), /it'\\''s/);
  const program = asPython("http://h", { ...body, min_p: 0.1 }, false);
  assert.match(program, /extra_body=\{\n {8}"min_p": 0.1,/);
  assert.equal(python({ a: [true, null] }), '{\n    "a": [\n        True,\n        None,\n    ],\n}');
});

test("recordings", () => {
  const recorder = new replay.Recorder(10);
  assert.equal(recorder.text, null);
  const whole = { at: 0, engine: { n: 0 }, front: {}, status: {}, requests: {}, latency: {} };
  recorder.add(whole, true);
  for (let at = 1; at <= 30; at += 1) recorder.add({ at, engine: { n: at } }, false);
  const frames = replay.framesOf(recorder.text);
  assert.deepEqual(frames.map(({ at }) => at), Array.from({ length: 12 }, (_, i) => 19 + i), "the last ten seconds, and what they build on");
  assert.deepEqual(frames.at(-1), { ...whole, at: 30, engine: { n: 30 } });
  assert.throws(() => replay.framesOf("{"), /Line 1/);
  assert.equal(replay.framesOf(`${recorder.text}{"at": 3`).length, frames.length, "the server was killed while it wrote");
  assert.throws(() => replay.framesOf(`${JSON.stringify(whole)}\n{\n`), /Line 2/);
  assert.throws(() => replay.framesOf('{"at": 1}'), /not a recording/);
});

test("the owner of a block", () => {
  assert.deepEqual(live.ownerRuns("0x2,17x3"), [["0", 2], ["17", 3]]);
  assert.deepEqual(live.ownerRuns(""), []);
  assert.deepEqual([0, 1, 2, 4, 5].map((block) => live.valueAt("0x2,17x3", block)), ["0", "0", "17", "17", null]);
  assert.equal(live.valueAt("f2u3", 2), "u");
  assert.deepEqual(live.cellOwners("0x2,17x3", 2), ["0", "17", "17"]);
});

test("steps are put together from snapshots", () => {
  const steps = new live.Steps(3);
  steps.add({ "0.1": [10, 1, 5, 0, 0, 1, 2.5], "0.2": [11, 2, 0, 1, 3, 2, 1] });
  steps.add({ "0.2": [11, 2, 0, 1, 3, 2, 1], "1.9": [10.5, 4, 0, 0, 0, 4, 3] });
  assert.deepEqual(steps.all.map(({ at }) => at), [10, 10.5, 11]);
  assert.deepEqual(steps.all.at(-1), { at: 11, decode: 2, prefill: 0, accepted: 1, wasted: 3, rows: 2, ms: 1 });
  steps.add({ "0.1": [50, 7, 0, 0, 0, 7, 1] }); // a new core counts from 1
  assert.deepEqual(steps.all.map(({ at }) => at), [10.5, 11, 50]);
  for (let i = 0; i < 10; i += 1) steps.add({ [`0.${i}`]: [100 + i, 1, 0, 0, 0, 1, 1] });
  assert.deepEqual(steps.all.map(({ at }) => at), [107, 108, 109]);
  steps.add(undefined);
});

test("the tree of prefixes, the heaviest first", () => {
  const leaf = (parent, tokens, sequences, pins = 0) => ({ parent, tokens, sequences, pins, groups: [] });
  const rows = live.prefixRows([leaf(-1, 16, 2), leaf(-1, 64, 3, 1), leaf(1, 96, 2), leaf(0, 32, 2)]);
  assert.deepEqual(rows.map(({ tokens, depth, saved }) => [tokens, depth, saved]), [[64, 0, 192], [96, 1, 32], [16, 0, 16], [32, 1, 16]]);
  assert.deepEqual(live.prefixRows(undefined), []);
});

test("requests that compute are shown before those that wait", () => {
  const rows = [];
  for (let i = 0; i < 30; i += 1) rows.push({ id: `done-${i}`, at: i, scheduled: 1, finished: 2 });
  for (let i = 0; i < 30; i += 1) rows.push({ id: `waits-${i}`, at: 100 + i });
  rows.push({ id: "runs", at: 90, scheduled: 5 });
  const found = live.chosenRows(rows, 24).map(({ id }) => id);
  assert.equal(found.length, 24);
  assert.deepEqual(found.slice(0, 3), ["runs", "waits-0", "waits-1"]);
  assert.deepEqual(found.slice(-8), Array.from({ length: 8 }, (_, i) => `done-${29 - i}`));
  assert.equal(live.chosenRows(rows.slice(0, 5), 24).length, 5);
  assert.equal(live.chosenRows(rows.slice(0, 30), 24).length, 24);
});

test("a recording is loaded from this server alone", async () => {
  const frame = { at: 1, engine: {}, front: {}, status: {}, requests: {}, latency: {} };
  const asked = [];
  const load = async (path) => ({ text: async () => (asked.push(path), JSON.stringify(frame)) });
  for (const address of ["/recording.jsonl", "recording.jsonl", "http://one.example/recording.jsonl"]) assert.equal((await replay.loadFrames(address, "http://one.example", load)).length, 1);
  assert.deepEqual(asked, Array(3).fill("/recording.jsonl"));
  await assert.rejects(replay.loadFrames("http://other.example/x", "http://one.example", load), /other\.example/);
  await assert.rejects(replay.loadFrames("//one.example.org/x", "http://one.example", load), /address of this server/);
});

test("a message with images has parts", () => {
  const url = "data:image/png;base64,iVBORw0KGgo=";
  const talk = talks.newConversation();
  talks.add(talk, { role: "user", content: "What?", images: [url] });
  assert.deepEqual(talks.asMessages(talk), [{ role: "user", content: [{ type: "image_url", image_url: { url } }, { type: "text", text: "What?" }] }]);
  assert.equal(talks.fromFile(talks.toFile([talk])).length, 1);
  for (const bad of ["http://elsewhere.example/a.png", "data:text/html;base64,AAAA", 'data:image/svg+xml;base64,AAAA', `${url}" onerror="x`, "data:image/png;base64,A", "data:image/png;base64,AAAA==", "data:image/png;base64,A===", 7]) {
    Object.values(talk.messages)[0].images = [bad];
    assert.throws(() => talks.fromFile(talks.toFile([talk])), /no conversations/);
  }
  const bare = talks.newConversation();
  talks.add(bare, { role: "user", content: "", images: [url] });
  assert.equal(bare.title, "An image");
  assert.equal(talks.asMessages(bare)[0].content.length, 1);
});

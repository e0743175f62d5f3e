// An answer that arrives in pieces, and the request that asks for it.

import { asMessages } from "./conversations.js";
import { wrongType } from "./schema.js";

/** Parameters that the panel has: name, label, step, and the server's default. */
export const PARAMETERS = [
  ["temperature", "Temperature", 0.05, 1],
  ["top_p", "Top p", 0.05, 1],
  ["top_k", "Top k", 1, 0],
  ["min_p", "Min p", 0.01, 0],
  ["max_tokens", "Longest answer", 1, "what fits"],
  ["presence_penalty", "Presence penalty", 0.1, 0],
  ["frequency_penalty", "Frequency penalty", 0.1, 0],
  ["repetition_penalty", "Repetition penalty", 0.05, 1],
  ["seed", "Seed", 1, "random"],
];

/** Return the body of a request. Raises Error, with words for people, for JSON that is none. */
export function requestBody(conversation, model, end) {
  const settings = conversation.settings;
  const body = { model, messages: asMessages(conversation, end) };
  for (const [name] of PARAMETERS) {
    const given = settings[name];
    if (given !== undefined && given !== "" && Number.isFinite(Number(given))) body[name] = Number(given);
  }
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.map((each) => each.replaceAll("\\n", "\n"));
  const tools = parsed(settings.tools, "Tools");
  if (tools !== null) body.tools = Array.isArray(tools) ? tools : [tools];
  const schema = parsedSchema(settings.schema);
  if (schema !== null) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

/** Return the JSON of a field; null if it is empty. */
export function parsed(text, what) {
  if (!text?.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} must be JSON: ${error.message}`);
  }
}

/** Return the JSON of a schema; null if the field is empty. A type that is misspelt allows anything. */
export function parsedSchema(text) {
  const schema = parsed(text, "The schema");
  const wrong = wrongType(schema);
  if (wrong !== null) throw new Error(`The schema has the type "${wrong}". Types are object, array, string, number, integer, boolean and null.`);
  return schema;
}

/** Puts the chunks of a stream into a message. now: a clock in milliseconds. */
export class Answer {
  constructor(message, now = () => performance.now()) {
    this.message = Object.assign(message, { content: "", reasoning: "", calls: [], tokens: [], end: null, error: null });
    this._now = now;
    this._begun = now();
    this._first = null;
    this._thought = null;
  }

  /** Take the text of one event. */
  take(data) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      this.message.error = chunk.error.message ?? String(chunk.error);
      return;
    }
    if (chunk.usage) this.message.usage = { prompt: chunk.usage.prompt_tokens, answer: chunk.usage.completion_tokens, cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 };
    const choice = chunk.choices?.[0];
    if (choice) this._choice(choice);
  }

  _choice({ delta, logprobs, finish_reason: reason }) {
    const message = this.message;
    const thought = delta?.reasoning_content ?? delta?.reasoning;
    if (thought || delta?.content || delta?.tool_calls) this._first ??= this._now();
    if (thought) {
      message.reasoning += thought;
      this._thought = this._now();
    }
    if (delta?.content) message.content += delta.content;
    for (const call of delta?.tool_calls ?? []) this._call(call);
    for (const each of logprobs?.content ?? []) message.tokens.push(tokenOf(each));
    if (reason) message.end = reason;
  }

  _call({ index, id, function: part }) {
    const call = (this.message.calls[index ?? 0] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (part?.name) call.name += part.name;
    if (part?.arguments) call.arguments += part.arguments;
  }

  /** Note the times at the end. wasStopped: whether the reader ended it. */
  finish({ wasStopped = false } = {}) {
    const message = this.message;
    const now = this._now();
    if (wasStopped) message.end = "stopped";
    message.firstMs = this._first === null ? null : this._first - this._begun;
    message.totalMs = now - this._begun;
    if (this._thought !== null) message.thoughtMs = this._thought - this._first;
    if (!message.tokens.length) delete message.tokens;
    return message;
  }
}

function tokenOf({ token, logprob, top_logprobs: top }) {
  return { text: token, logprob, top: (top ?? []).map(({ token: text, logprob: each }) => [text, each]) };
}

const SHORTEST_MS = 200;

/** Return the tokens per second after the first one; null if that cannot be told. The pieces of a
 * short answer may come all at once, and the time between them is no time of the engine. */
export function speedOf(message) {
  const count = (message.usage?.answer ?? 0) - 1;
  const ms = (message.totalMs ?? 0) - (message.firstMs ?? 0);
  return count > 0 && ms >= SHORTEST_MS ? (1000 * count) / ms : null;
}

const ENDS = {
  length: "It reached the token limit.",
  content_filter: "A hook of the server ended it.",
  repetition: "It was stopped because it repeated itself.",
  stopped: "You stopped it.",
  abort: "The request was ended early.",
  left: "The page was left before the answer ended.",
};

/** Return why an answer ended, if that needs words. */
export function endWords(message) {
  if (message.error) return message.error;
  return ENDS[message.end] ?? null;
}

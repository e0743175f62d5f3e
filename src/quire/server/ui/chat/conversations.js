// Conversations as trees: each message has a parent, so an edit or another answer is a branch.

import { isImage } from "./images.js";

const STORE = "quire-conversations";
const MAX_KEPT = 200;

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings = {}) {
  return { id: newId(), title: "", at: Date.now(), messages: {}, last: null, settings };
}

/** Add a message below another one, and make it the end of what is shown. */
export function add(conversation, message, parent = conversation.last) {
  const made = { id: newId(), parent, at: Date.now(), ...message };
  conversation.messages[made.id] = made;
  conversation.last = made.id;
  conversation.at = made.at;
  if (!conversation.title && made.role === "user") conversation.title = made.content.trim().replace(/\s+/g, " ").slice(0, 80) || "An image";
  return made;
}

/** Return the messages that are shown, first to last. */
export function path(conversation) {
  const found = [];
  for (let at = conversation.last; at && conversation.messages[at]; at = conversation.messages[at].parent) found.push(conversation.messages[at]);
  return found.reverse();
}

/** Return the branches beside a message, itself included, oldest first. */
export function siblings(conversation, message) {
  return Object.values(conversation.messages).filter((each) => each.parent === message.parent && each.role === message.role);
}

/** Show the branch of a message, down to its newest end. */
export function select(conversation, id) {
  const children = (parent) => Object.values(conversation.messages).filter((each) => each.parent === parent);
  let at = id;
  for (let below = children(at); below.length; below = children(at)) at = below.at(-1).id;
  conversation.last = at;
}

/** Return the messages in the form of the API, without answers that never came. */
export function asMessages(conversation, end = conversation.last) {
  const shown = path({ ...conversation, last: end });
  const system = conversation.settings.system?.trim();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const each of shown) {
    if (each.failed) continue;
    if (each.role === "assistant") {
      const message = { role: "assistant", content: each.content || (each.calls?.length ? null : "") };
      if (each.calls?.length) message.tool_calls = each.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      found.push(message);
    } else if (each.role === "tool") {
      found.push({ role: "tool", tool_call_id: each.callId, content: each.content });
    } else {
      found.push({ role: each.role, content: each.images?.length ? parts(each) : each.content });
    }
  }
  return found;
}

/** Return the parts of a message with images, which come first, as models are taught. */
function parts({ content, images }) {
  const found = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...found, { type: "text", text: content }] : found;
}

/** Return conversations from a file. Raises Error, with words for people, if it is none. */
export function fromFile(text) {
  let list;
  try {
    list = listed(JSON.parse(text));
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (!list.length || !list.every(isWhole)) throw new Error("The file holds no conversations from this page.");
  return list.map(filledIn);
}

function listed(data) {
  const list = data?.conversations ?? data;
  return Array.isArray(list) ? list : [list];
}

function isWhole(each) {
  return each && typeof each.id === "string" && each.messages && typeof each.messages === "object" && isTree(each.messages);
}

function filledIn(each) {
  return { ...newConversation(), ...each, title: String(each.title ?? ""), settings: each.settings ?? {} };
}

function isMessage(each) {
  const isText = (value) => value === undefined || value === null || typeof value === "string";
  const isList = (value) => value === undefined || Array.isArray(value);
  const isCall = (call) => call && [call.id, call.name, call.arguments].every((value) => typeof value === "string");
  return each && typeof each.content === "string" && ["user", "assistant", "tool"].includes(each.role) && [each.reasoning, each.schema, each.error].every(isText) && isList(each.calls) && isList(each.images) && (each.images ?? []).every(isImage) && (each.calls ?? []).every(isCall);
}

/** Return whether these are messages, each below another one or the first: a ring has no end. */
function isTree(messages) {
  if (!Object.entries(messages).every(([id, each]) => isMessage(each) && each.id === id)) return false;
  const reach = new Set([null]);
  for (const id of Object.keys(messages)) {
    const chain = new Set();
    for (let at = id; !reach.has(at); at = messages[at].parent) {
      if (chain.has(at) || !Object.hasOwn(messages, at)) return false;
      chain.add(at);
    }
    for (const each of chain) reach.add(each);
  }
  return true;
}

export function toFile(conversations) {
  return JSON.stringify({ format: "quire conversations", version: 1, conversations }, null, 2);
}

/** Return the conversations in a text that was stored; those that are not whole are left out. */
function kept(text) {
  try {
    return listed(JSON.parse(text || "[]")).filter(isWhole).map(filledIn);
  } catch {
    return [];
  }
}

/** The conversations of this browser. storage: `localStorage`, or what has its methods. */
export class ConversationStore {
  constructor(storage) {
    this._storage = storage;
    this._known = "";
    this._removed = new Set();
    this.all = [];
    this._takeIn();
  }

  /** Take in what other tabs have kept since this one looked: each writes all that it has. */
  _takeIn() {
    const text = this._storage.getItem(STORE) ?? "";
    if (text === this._known) return;
    this._known = text;
    const own = new Map(this.all.map((each) => [each.id, each]));
    for (const other of kept(text)) {
      const mine = own.get(other.id);
      if (mine) mine.messages = { ...other.messages, ...mine.messages };
      else if (!this._removed.has(other.id)) this.all.push(other);
    }
  }

  /** Keep them. Returns false if there is no room, after the oldest were dropped from what is kept. */
  save() {
    this._takeIn();
    this.all.sort((one, other) => other.at - one.at);
    this.all.length = Math.min(this.all.length, MAX_KEPT);
    const written = this.all.filter((each) => each.last !== null).map(lean);
    for (let count = written.length; count > 0; count = Math.floor(count / 2)) {
      try {
        const text = toFile(written.slice(0, count));
        this._storage.setItem(STORE, text);
        this._known = text;
        return count === written.length;
      } catch {
        // The quota is used up: keep the newer half.
      }
    }
    if (!written.length) this._storage.removeItem(STORE);
    return written.length === 0;
  }

  remove(id) {
    this._removed.add(id);
    this.all = this.all.filter((each) => each.id !== id);
    return this.save();
  }
}

/** Return a conversation without the probabilities of tokens, which take much room. */
function lean(conversation) {
  const messages = Object.entries(conversation.messages).map(([id, { tokens: _, ...message }]) => [id, message]);
  return { ...conversation, messages: Object.fromEntries(messages) };
}

// Conversations as trees: each message has a parent, so an edit or another answer is a branch.

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
  if (!conversation.title && made.role === "user") conversation.title = made.content.trim().replace(/\s+/g, " ").slice(0, 80);
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
      found.push({ role: each.role, content: each.content });
    }
  }
  return found;
}

/** Return conversations from a file. Raises Error, with words for people, if it is none. */
export function fromFile(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  const list = data?.conversations ?? (Array.isArray(data) ? data : [data]);
  const isOne = (each) => each && typeof each.id === "string" && each.messages && typeof each.messages === "object" && Object.values(each.messages).every(isMessage);
  if (!Array.isArray(list) || !list.length || !list.every(isOne)) throw new Error("The file has no conversations of this page.");
  return list.map((each) => ({ ...newConversation(), ...each, title: String(each.title ?? ""), settings: each.settings ?? {} }));
}

function isMessage(each) {
  return each && typeof each.content === "string" && ["user", "assistant", "tool"].includes(each.role);
}

export function toFile(conversations) {
  return JSON.stringify({ format: "quire conversations", version: 1, conversations }, null, 2);
}

/** The conversations of this browser. storage: `localStorage`, or what has its methods. */
export class ConversationStore {
  constructor(storage) {
    this._storage = storage;
    try {
      this.all = fromFile(storage.getItem(STORE) ?? "[]");
    } catch {
      this.all = [];
    }
  }

  /** Keep them. Returns false if there is no room, after the oldest were dropped from what is kept. */
  save() {
    this.all.sort((one, other) => other.at - one.at);
    this.all.length = Math.min(this.all.length, MAX_KEPT);
    const kept = this.all.filter((each) => each.last !== null).map(lean);
    for (let count = kept.length; count > 0; count = Math.floor(count / 2)) {
      try {
        this._storage.setItem(STORE, toFile(kept.slice(0, count)));
        return count === kept.length;
      } catch {
        // The quota is used up: keep the newer half.
      }
    }
    if (!kept.length) this._storage.removeItem(STORE);
    return kept.length === 0;
  }

  remove(id) {
    this.all = this.all.filter((each) => each.id !== id);
    return this.save();
  }
}

/** Return a conversation without the probabilities of tokens, which take much room. */
function lean(conversation) {
  const messages = Object.entries(conversation.messages).map(([id, { tokens: _, ...message }]) => [id, message]);
  return { ...conversation, messages: Object.fromEntries(messages) };
}

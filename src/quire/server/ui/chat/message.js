// One message of a conversation, as elements.

import { ROOT } from "../api.js";
import { duration, fill, h, iconButton, number } from "../dom.js";
import { endWords, parsed, speedOf } from "./answer.js";
import { thumbnails } from "./images.js";
import { MAX_SHOWN, MarkdownView } from "./render.js";
import { visible } from "./markdown.js";
import { faultOf } from "./schema.js";

const MAX_TOKENS_SHOWN = 3000;

/** The element of an answer, which `update` keeps in step with a message that grows. */
export class AnswerView {
  /** actions: see `Chat`. */
  constructor(message, actions) {
    this._message = message;
    this._actions = actions;
    this._markdown = new MarkdownView();
    this._thought = h("div", { class: "thought-text", dir: "auto" });
    this._summary = h("summary", {}, "Thinking");
    this._details = h("details", { class: "thought", hidden: true }, this._summary, this._thought);
    this._calls = h("div", { class: "calls" });
    this._tokens = h("div", { class: "tokens", hidden: true });
    this._note = h("div", { class: "note" });
    this._foot = h("div", { class: "message-foot" });
    this._isShowingTokens = false;
    this.element = h("article", { class: "message assistant", "aria-label": "Answer" }, this._details, this._markdown.element, this._tokens, this._calls, this._note, this._foot);
  }

  /** isOpen: whether more may come. */
  update(isOpen) {
    const message = this._message;
    this.element.classList.toggle("open", isOpen);
    this.element.setAttribute("aria-busy", String(isOpen));
    this._details.hidden = !message.reasoning;
    const thought = message.reasoning ?? "";
    this._thought.textContent = visible(thought.slice(0, MAX_SHOWN)) + (thought.length > MAX_SHOWN ? " …" : "");
    const isThinking = isOpen && !message.content && !message.calls?.length;
    this._summary.textContent = isThinking ? "Thinking …" : `Thought${Number.isFinite(message.thoughtMs) ? ` for ${duration(message.thoughtMs)}` : ""}`;
    this._markdown.show(message.content);
    if (isOpen) this._showWait(!message.content && !message.reasoning && !message.calls?.length);
    else this._close();
  }

  /** Say that nothing has come yet, and where to see why. */
  _showWait(isWaiting) {
    if (isWaiting === (this._note.firstChild !== null)) return;
    fill(this._note, isWaiting && h("p", { class: "hint late" }, "No token yet. ", h("a", { href: "#engine" }, "See what the request waits for")));
  }

  _close() {
    const message = this._message;
    fill(this._calls, (message.calls ?? []).map((call, i) => this._call(call, i)));
    const words = endWords(message);
    fill(this._note, words && h("p", { class: message.error ? "error" : "hint" }, words), this._verdict());
    fill(this._foot, this._buttons(), h("span", { class: "figures" }, figures(message)));
  }

  _verdict() {
    const { schema } = this._message;
    if (!schema || this._message.calls?.length) return null;
    let fault;
    try {
      fault = faultOf(JSON.parse(this._message.content), parsed(schema, "The schema"));
    } catch (error) {
      fault = error.message;
    }
    return fault ? h("p", { class: "error" }, `Does not match the schema: ${fault}`) : h("p", { class: "good" }, "Matches the schema");
  }

  _call(call, index) {
    const given = this._actions.resultOf(this._message, call);
    let text = call.arguments;
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // It is shown as it came.
    }
    const head = h("div", { class: "code-head" }, h("span", {}, `Tool call: ${visible(call.name)}`));
    const box = h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, visible(text).slice(0, MAX_SHOWN))));
    if (given !== null) return h("div", { class: "call" }, box, h("div", { class: "result" }, h("span", { class: "label" }, "Result"), h("pre", {}, visible(given).slice(0, MAX_SHOWN))));
    const name = `result-${this._message.id}-${index}`;
    const area = h("textarea", { id: name, rows: "2", placeholder: "What the tool returns" });
    const form = h("form", { class: "result-form" }, h("label", { for: name }, "Result"), area, h("button", { class: "button", type: "submit" }, "Send the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this._actions.answerCall(this._message, call, area.value);
    });
    return h("div", { class: "call" }, box, form);
  }

  _buttons() {
    const { actions, message } = { actions: this._actions, message: this._message };
    return [
      actions.branches(message),
      iconButton("copy", "Copy the answer", () => actions.copy(message.content)),
      iconButton("retry", "Regenerate the answer", () => actions.regenerate(message)),
      message.tokens?.length ? iconButton("chart", "Token probabilities", () => this._toggleTokens()) : null,
      message.requestId ? iconButton("clock", "How the request went", () => actions.showRequest(message.requestId)) : null,
    ];
  }

  _toggleTokens() {
    this._isShowingTokens = !this._isShowingTokens;
    this._tokens.hidden = !this._isShowingTokens;
    this._markdown.element.hidden = this._isShowingTokens;
    const shown = this._message.tokens.slice(0, MAX_TOKENS_SHOWN);
    fill(this._tokens, this._isShowingTokens ? shown.map(tokenElement) : []);
  }
}

/** Return a token, coloured by its probability, with its alternatives on hover or focus. */
function tokenElement({ text, logprob, top }) {
  const level = Math.min(4, Math.floor(-Math.log2(Math.max(Math.exp(logprob), 1e-9)) / 1.5));
  const rows = top.map(([other, each]) => h("tr", { class: other === text ? "chosen" : "" }, h("td", {}, shownToken(other)), h("td", {}, percent(each))));
  const card = h("span", { class: "token-card", role: "tooltip" }, h("table", {}, h("tbody", {}, rows.length ? rows : h("tr", {}, h("td", {}, shownToken(text)), h("td", {}, percent(logprob))))));
  return h("span", { class: `token level-${level}`, tabindex: "0" }, visible(text), card);
}

function shownToken(text) {
  return visible(text).replaceAll("\n", "⏎").replaceAll(" ", "␣") || "(empty)";
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

function figures(message) {
  const speed = speedOf(message);
  return [
    message.usage && `${number(message.usage.answer)} tokens`,
    speed && `${number(speed, speed < 10 ? 1 : 0)} tokens/s`,
    Number.isFinite(message.firstMs) && message.firstMs !== null && `first after ${duration(message.firstMs)}`,
    message.usage?.cached ? `${number(message.usage.cached)} of ${number(message.usage.prompt)} prompt tokens cached` : null,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** Return a message of the user, or the form that edits it. */
export function userElement(message, actions) {
  const text = h("div", { class: "user-text", dir: "auto" }, visible(message.content).slice(0, MAX_SHOWN));
  const edit = () => {
    const area = h("textarea", { class: "edit-area", "aria-label": "Edit the message", rows: String(Math.min(12, message.content.split("\n").length + 1)) });
    area.value = message.content;
    const back = () => {
      form.replaceWith(text);
      pen.focus();
    };
    const form = h("form", { class: "edit-form" }, area, h("div", { class: "row end" }, h("button", { type: "button", class: "button", onclick: back }, "Cancel"), h("button", { type: "submit", class: "button primary" }, "Send again")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() || message.images?.length) actions.edit(message, area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        back();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    text.replaceWith(form);
    area.focus();
  };
  const pen = iconButton("edit", "Edit the message", edit);
  const images = message.images?.length ? h("div", { class: "attachments sent" }, thumbnails(message.images)) : null;
  const foot = h("div", { class: "message-foot" }, actions.branches(message), iconButton("copy", "Copy the message", () => actions.copy(message.content)), pen);
  return h("article", { class: "message user", "aria-label": "You" }, images, text, foot);
}

/** Return the switch between branches; null if there is one alone. */
export function branchSwitch(all, message, onSelect) {
  if (all.length < 2) return null;
  const at = all.findIndex((each) => each.id === message.id);
  const go = (step) => onSelect(all[(at + step + all.length) % all.length].id);
  return h("span", { class: "branches" }, iconButton("left", "Previous branch", () => go(-1)), h("span", {}, `${at + 1}/${all.length}`), iconButton("right", "Next branch", () => go(1)));
}

/** Return what an empty conversation shows. hint: words about the model, or null. */
export function emptyHint(ideas, onPick, hint = null) {
  return h("div", { class: "welcome" }, h("img", { src: `${ROOT}/ui/quire.svg`, alt: "", width: "48", height: "48" }), h("h2", {}, "What would you like to ask?"), hint && h("p", { class: "model-hint" }, hint), h("p", { class: "hint" }, "Conversations stay in this browser."), h("div", { class: "ideas" }, ideas.map((idea) => h("button", { type: "button", class: "button", onclick: () => onPick(idea) }, idea))));
}

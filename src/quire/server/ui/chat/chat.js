// The chat: conversations at the side, messages, the composer, and a panel of parameters.

import { call, events, key, LostError, ROOT } from "../api.js";
import { Answer, requestBody } from "./answer.js";
import { add, asMessages, ConversationStore, fromFile, newConversation, path, select, siblings, toFile } from "./conversations.js";
import { copyText, download, fill, h, icon, iconButton, toast } from "../dom.js";
import { MAX_IMAGES, readImage, thumbnails } from "./images.js";
import { AnswerView, branchSwitch, emptyHint, userElement } from "./message.js";
import { namesOfSet, settingsPanel } from "./settings.js";
import { asCurl, asEnvironment, asPython } from "./snippets.js";

const IDEAS = ["Explain how a KV cache works.", "Write a haiku about paper.", "Plan a walk through an old town."];
const SMALL_IDEAS = ["What can you do?", "What is the capital of France?", "What is 12 plus 5?"];
const SMALL_HINT = "This is the demonstration model that comes with quire. It is very small and knows little. For useful answers, start the server with another model: quire serve MODEL.";
const NEAR_END = 120;

/** The view. showRequest: shows a request's timeline, by its id. onLost: called if the server does
 * not answer. */
export class Chat {
  constructor(element, showRequest, onLost = () => {}) {
    this._store = new ConversationStore(localStorage);
    this._current = this._store.all[0] ?? newConversation();
    this._models = [];
    this._running = null;
    this._showRequest = showRequest;
    this._onLost = onLost;
    this._answering = null;
    this._list = h("ul", { class: "conversations" });
    this._messages = h("div", { class: "messages", tabindex: "0", role: "log", "aria-label": "Messages" });
    this._input = h("textarea", { id: "composer", rows: "1", placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send" });
    this._send = h("button", { type: "submit", class: "send", "aria-label": "Send" }, icon("send"));
    this._model = h("select", { class: "model", "aria-label": "Model" });
    this._panel = h("aside", { class: "panel", "aria-label": "Parameters", hidden: true });
    this._panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // elsewhere it stops an answer
      this._togglePanel();
    });
    this._side = this._sidebar();
    this._images = [];
    this._attached = h("div", { class: "attachments", hidden: true });
    const file = h("input", { type: "file", accept: "image/*", multiple: true, class: "offscreen", tabindex: "-1", "aria-label": "File of an image" });
    file.addEventListener("change", async () => {
      await this._attach([...file.files]);
      file.value = "";
    });
    this._imageButton = iconButton("image", "Attach an image", () => file.click(), { hidden: true });
    const form = h("form", { class: "composer" }, this._imageButton, this._input, this._send, file);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this._running) this.stop();
      else this._submit();
    });
    this._wireInput(form);
    const column = h("div", { class: "chat-column" }, this._toolbar(), this._messages, this._attached, form);
    column.addEventListener("click", () => this._hideSide());
    column.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); // else the page is left for the file
    });
    column.addEventListener("drop", (event) => this._takeFiles(event, event.dataTransfer));
    window.addEventListener("pagehide", () => this._leave());
    element.append(this._side, column, this._panel);
    this._actions = this._makeActions();
    this._show();
  }

  async loadModels() {
    const { data } = await (await call("/v1/models")).json();
    this._models = data;
    const wanted = this._current.settings.model;
    fill(this._model, data.map(({ id }) => h("option", { value: id }, id)));
    if (data.some(({ id }) => id === wanted)) this._model.value = wanted;
    if (!path(this._current).length) this._show();
    this._showPanel();
  }

  focus() {
    this._input.focus();
  }

  toggleSide() {
    return this._side.classList.toggle("shown");
  }

  _hideSide() {
    this._side.classList.remove("shown");
    document.getElementById("menu").setAttribute("aria-expanded", "false");
  }

  stop() {
    this._running?.abort();
  }

  _sidebar() {
    const file = h("input", { type: "file", accept: "application/json,.json", class: "offscreen", tabindex: "-1", "aria-label": "File of conversations" });
    file.addEventListener("change", () => this._import(file));
    return h(
      "aside",
      { class: "side", "aria-label": "Conversations" },
      h("button", { type: "button", class: "button new", onclick: () => this._open(newConversation({ ...this._current.settings })) }, icon("plus"), "New chat"),
      this._list,
      h("div", { class: "side-foot" }, iconButton("upload", "Import conversations", () => file.click()), iconButton("download", "Export all conversations", () => download("quire-conversations.json", toFile(this._store.all))), file),
    );
  }

  _toolbar() {
    this._model.addEventListener("change", () => {
      this._current.settings.model = this._model.value;
      this._store.save();
      this._showPanel();
    });
    const menu = h("details", { class: "menu" }, h("summary", { class: "icon-button", "aria-label": "Copy as", title: "Copy as" }, icon("code")));
    const item = (label, make) => h("button", { type: "button", onclick: () => ((menu.open = false), this._copyAs(make)) }, label);
    menu.append(
      h("div", { class: "menu-items" }, item("Copy as curl", (body) => asCurl(ROOT, body, key.get() !== "")), item("Copy as Python", (body) => asPython(ROOT, body, key.get() !== "")), item("Copy the environment for agents", (body) => asEnvironment(ROOT, body.model, key.get() !== "")), item("Copy the messages as JSON", (body) => JSON.stringify(body.messages, null, 2))),
    );
    menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") menu.open = false;
    });
    document.addEventListener("click", (event) => {
      if (!menu.contains(event.target)) menu.open = false;
    });
    const parameters = iconButton("sliders", "Parameters", () => this._togglePanel(), { "aria-expanded": "false" });
    this._panelButton = parameters;
    this._set = h("button", { type: "button", class: "link set", title: "Parameters of this conversation that are not the model's", hidden: true, onclick: () => this._togglePanel() });
    return h("div", { class: "toolbar" }, this._model, h("span", { class: "grow" }), this._set, menu, parameters);
  }

  _wireInput(form) {
    this._input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !this._running) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this._input.addEventListener("input", () => this._fitInput());
    this._input.addEventListener("paste", (event) => this._takeFiles(event, event.clipboardData));
  }

  /** Attach what was pasted or dropped, or say why not. */
  _takeFiles(event, data) {
    const files = [...(data?.files ?? [])];
    const hasText = event.type === "paste" && data.types.includes("text/plain"); // a spreadsheet copies both
    if (!files.length || (hasText && this._imageButton.hidden)) return;
    event.preventDefault();
    const images = files.filter(({ type }) => type.startsWith("image/"));
    if (!images.length) toast("A message takes text and images alone. Conversations are imported at the side.");
    else if (this._imageButton.hidden) toast(`${this._model.value || "The model"} takes no images. A model with vision does.`);
    else this._attach(images);
  }

  /** Keep the part of an answer that has come when the page is closed. */
  _leave() {
    const message = this._answering;
    if (!message) return;
    Object.assign(message, { end: "left", failed: !message.content && !message.calls.length });
    this._keep();
  }

  async _attach(files) {
    for (const each of files) {
      if (this._images.length >= MAX_IMAGES) {
        toast(`A message takes ${MAX_IMAGES} images.`);
        break;
      }
      try {
        this._images.push(await readImage(each));
      } catch (error) {
        toast(error.message);
      }
    }
    this._showAttached();
  }

  _showAttached() {
    this._attached.hidden = !this._images.length;
    fill(this._attached, thumbnails(this._images, (place) => {
      this._images.splice(place, 1);
      this._showAttached();
      this._input.focus();
    }));
  }

  _fitInput() {
    this._input.style.height = "auto";
    this._input.style.height = `${Math.min(this._input.scrollHeight, 220)}px`;
  }

  _makeActions() {
    return {
      copy: copyText,
      showRequest: this._showRequest,
      edit: (message, content) => this._edit(message, content),
      regenerate: (message) => this._answer(message.parent),
      branches: (message) => branchSwitch(siblings(this._current, message), message, (id) => this._select(id)),
      resultOf: (message, found) => this._resultOf(message, found),
      answerCall: (message, found, content) => this._answerCall(message, found, content),
    };
  }

  _edit(message, content) {
    if (this._running) toast("Stop the answer first.");
    else if (this._isWhole()) this._ask(add(this._current, { role: "user", content, images: message.images }, message.parent));
  }

  _select(id) {
    if (this._running) return;
    select(this._current, id);
    this._store.save();
    this._show();
  }

  _open(conversation) {
    this.stop();
    this._current = conversation;
    this._hideSide();
    const wanted = conversation.settings.model;
    if (this._models.some(({ id }) => id === wanted)) this._model.value = wanted;
    this._show();
    this._showPanel();
    this._input.focus();
  }

  async _import(file) {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    try {
      const found = fromFile(await chosen.text());
      const known = new Set(found.map(({ id }) => id));
      this._store.all = [...found, ...this._store.all.filter(({ id }) => !known.has(id))];
      this._open(found[0]); // now the one that was open may go
      this._keep();
      toast(`${found.length} ${found.length === 1 ? "conversation" : "conversations"} imported`);
    } catch (error) {
      toast(error.message);
    }
  }

  _keep() {
    if (!this._store.all.includes(this._current) && this._current.last !== null) this._store.all.unshift(this._current);
    if (!this._store.save()) toast("The browser's storage is full. Export some conversations, then delete them.");
    this._showList();
  }

  _showList() {
    fill(
      this._list,
      this._store.all.map((each) => {
        const open = h("button", { type: "button", class: "conversation", "aria-current": each === this._current ? "true" : undefined, onclick: () => this._open(each) }, each.title || "Untitled");
        const remove = iconButton("trash", "Delete this conversation", () => {
          this._store.remove(each.id);
          if (each === this._current) this._open(this._store.all[0] ?? newConversation());
          else this._showList();
        });
        const save = iconButton("download", "Export this conversation", () => download("quire-conversation.json", toFile([each])));
        return h("li", {}, open, h("span", { class: "conversation-actions" }, save, remove));
      }),
    );
  }

  /** Draw the conversation. The focus stays on the button that it was on, or at least among the messages. */
  _show() {
    const { activeElement: focused } = document;
    const at = [...this._messages.children].findIndex((each) => each.contains(focused));
    this._draw();
    if (at < 0) return;
    const label = focused.getAttribute("aria-label");
    const same = label && [...(this._messages.children[at]?.querySelectorAll("button") ?? [])].find((each) => each.getAttribute("aria-label") === label);
    (same || this._messages).focus({ preventScroll: true });
  }

  _draw() {
    this._showList();
    const shown = path(this._current);
    if (!shown.length) {
      const isSmall = this._models.find(({ id }) => id === this._model.value)?.root === "bundled";
      fill(this._messages, emptyHint(isSmall ? SMALL_IDEAS : IDEAS, (idea) => this._submit(idea), isSmall ? SMALL_HINT : null));
      return;
    }
    fill(this._messages, shown.map((message) => this._element(message)));
    this._messages.scrollTop = this._messages.scrollHeight;
  }

  _element(message) {
    if (message.role === "user") return userElement(message, this._actions);
    if (message.role === "tool") return null; // shown below its call
    const view = new AnswerView(message, this._actions);
    view.update(false);
    return view.element;
  }

  _submit(given) {
    const content = (given ?? this._input.value).trimEnd();
    if (!(content.trim() || this._images.length) || this._running) return;
    if (!this._isWhole()) return;
    const images = this._images.length ? this._images : undefined;
    this._input.value = "";
    this._fitInput();
    this._images = [];
    this._showAttached();
    this._ask(add(this._current, { role: "user", content, images }));
  }

  /** Return whether the parameters make a request. If not, the reader learns why, and nothing is lost. */
  _isWhole() {
    try {
      this._body();
      return true;
    } catch (error) {
      toast(error.message);
      if (this._panel.hidden) this._togglePanel();
      this._panel.querySelector(".error:not([hidden])")?.previousElementSibling.focus();
      return false;
    }
  }

  _ask(message) {
    this._keep();
    return this._answer(message.id);
  }

  _resultOf(message, found) {
    const result = path(this._current).find((each) => each.role === "tool" && each.callId === found.id);
    return result && Object.hasOwn(this._current.messages, message.id) ? result.content : null;
  }

  _answerCall(message, found, content) {
    if (this._running || !this._isWhole()) return;
    const made = add(this._current, { role: "tool", callId: found.id, content });
    const isDone = message.calls.every((each) => this._resultOf(message, each) !== null);
    if (isDone) this._ask(made);
    else {
      this._keep();
      this._show();
    }
  }

  _body(end) {
    return requestBody(this._current, this._model.value || undefined, end);
  }

  _copyAs(make) {
    try {
      const body = this._body();
      if (!body.messages.length) body.messages = [{ role: "user", content: this._input.value || "Hello!" }];
      copyText(make(body));
    } catch (error) {
      toast(error.message);
    }
  }

  /** Generate an answer below a message. */
  async _answer(parent) {
    if (this._running) return;
    let body;
    try {
      body = this._body(parent);
    } catch (error) {
      toast(error.message);
      this._show();
      return;
    }
    const conversation = this._current;
    const message = add(conversation, { role: "assistant", content: "", schema: body.response_format ? conversation.settings.schema : undefined }, parent);
    const answer = new Answer(message);
    this._answering = message;
    this._show();
    const view = new AnswerView(message, this._actions);
    const hadFocus = this._messages.lastChild.contains(document.activeElement);
    this._messages.lastChild.replaceWith(view.element);
    if (hadFocus) this._messages.focus({ preventScroll: true });
    view.update(true);
    this._messages.scrollTop = this._messages.scrollHeight;
    const running = new AbortController();
    this._setRunning(running);
    await this._read(body, answer, running.signal, frames(() => this._follow(() => view.update(true))));
    answer.finish({ wasStopped: running.signal.aborted });
    this._answering = null;
    this._setRunning(null);
    if (!message.content && !message.calls.length && (message.error || running.signal.aborted)) message.failed = true;
    if (conversation === this._current) this._follow(() => view.update(false));
    this._keep();
  }

  async _read(body, answer, signal, onNews) {
    try {
      const response = await call("/v1/chat/completions", { body, signal });
      answer.message.requestId = response.headers.get("x-request-id");
      for await (const data of events(response)) {
        answer.take(data);
        onNews();
      }
    } catch (error) {
      if (answer.message.end === "left") return;
      if (error.name !== "AbortError") answer.message.error = error.message || String(error);
      if (error instanceof LostError) this._onLost();
    } finally {
      onNews.cancel();
    }
  }

  /** Change what is shown, and keep the end in view if it was. */
  _follow(change) {
    const box = this._messages;
    const wasNear = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    change();
    if (wasNear) box.scrollTop = box.scrollHeight;
  }

  _setRunning(running) {
    this._running = running;
    fill(this._send, icon(running ? "stop" : "send"));
    this._send.setAttribute("aria-label", running ? "Stop" : "Send");
    this._send.classList.toggle("stop", running !== null);
  }

  _togglePanel() {
    this._panel.hidden = !this._panel.hidden;
    this._panelButton.setAttribute("aria-expanded", String(!this._panel.hidden));
    if (this._panel.hidden) this._panelButton.focus();
    else this._panel.querySelector("textarea, input")?.focus();
  }

  _showPanel() {
    const model = this._models.find(({ id }) => id === this._model.value);
    this._imageButton.hidden = !model?.input_modalities?.includes("image");
    const settings = this._current.settings;
    const onChange = () => {
      this._store.save();
      this._showSet();
    };
    fill(this._panel, settingsPanel(settings, model?.default_sampling_params ?? {}, onChange, () => this._togglePanel()));
    this._showSet();
  }

  /** Name the parameters that are set, also while the panel is closed: they shape each answer. */
  _showSet() {
    const names = namesOfSet(this._current.settings);
    this._set.hidden = !names.length;
    this._set.textContent = names.length > 3 ? `${names.length} parameters set` : `Set: ${names.join(", ")}`;
  }

  /** Messages of the API, for tests in a browser. */
  get messages() {
    return asMessages(this._current);
  }
}

/** Return a function that runs `work` in the next frame, once however often it is called. */
function frames(work) {
  let asked = 0;
  const ask = () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      work();
    });
  };
  ask.cancel = () => cancelAnimationFrame(asked);
  return ask;
}

// The page: its two views, the theme, and the state of the server.

import { Chat } from "./chat/chat.js";
import { fill, icon, toast } from "./dom.js";
import { showRequest } from "./drawer.js";
import { EngineView } from "./engine.js";

const THEMES = { auto: "auto", light: "sun", dark: "moon" };
const POLL_MS = 3000;

const byId = (id) => document.getElementById(id);

function wireTheme() {
  const button = byId("theme");
  const show = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    fill(button, icon(THEMES[name]));
    button.title = `Theme: ${name}`;
    button.setAttribute("aria-label", `Theme: ${name}`);
  };
  const kept = localStorage.getItem("quire-theme");
  let now = kept in THEMES ? kept : "auto";
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    now = names[(names.indexOf(now) + 1) % names.length];
    localStorage.setItem("quire-theme", now);
    show(now);
    window.dispatchEvent(new Event("resize")); // pictures take the new colours
  });
  show(now);
}

function showState({ state, message }) {
  const element = byId("state");
  if (element.dataset.state === state && element.title === (message ?? "")) return;
  element.dataset.state = state;
  element.textContent = state;
  element.title = message ?? "";
}

let asking = null;

/** Ask for the models until the engine is ready to name them; once, however often it is called. */
function loadModels(chat) {
  asking ??= askForModels(chat).finally(() => (asking = null));
  return asking;
}

async function askForModels(chat) {
  for (;;) {
    try {
      await chat.loadModels();
      showState({ state: "ready" });
      return;
    } catch (error) {
      showState({ state: error.status === 503 ? "starting" : "unreachable", message: error.message });
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }
}

function wireKeys(chat) {
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !byId("chat").hidden) {
      event.preventDefault();
      chat.focus();
    }
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
  });
}

function start() {
  wireTheme();
  fill(byId("menu"), icon("menu"));
  const chat = new Chat(byId("chat"), (id) => showRequest(id), () => loadModels(chat));
  const engine = new EngineView(byId("engine"), showState, (row, now, id = row.id) => showRequest(id, row, now));
  byId("menu").addEventListener("click", () => byId("menu").setAttribute("aria-expanded", String(chat.toggleSide())));
  const asked = new URLSearchParams(location.search);
  const replay = asked.get("replay");
  const show = () => {
    const isEngine = location.hash === "#engine";
    byId("chat").hidden = isEngine;
    byId("engine").hidden = !isEngine;
    byId("menu").hidden = isEngine;
    for (const name of ["chat", "engine"]) {
      const isShown = (name === "engine") === isEngine;
      if (isShown) byId(`tab-${name}`).setAttribute("aria-current", "page");
      else byId(`tab-${name}`).removeAttribute("aria-current");
    }
    if (replay === null && isEngine && !document.hidden) engine.start();
    else engine.stop();
  };
  window.addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", show); // nothing is gathered for a hidden tab
  wireKeys(chat);
  if (replay !== null) {
    // There need be no engine: the recording is all that is shown.
    byId("tab-chat").hidden = true;
    location.hash = "#engine";
    show();
    const frame = asked.get("frame");
    engine.replayFrom(replay, frame === null ? null : Math.max(0, Math.trunc(Number(frame)) || 0));
    return;
  }
  show();
  loadModels(chat).then(() => chat.focus()).catch((error) => toast(error.message));
}

start();

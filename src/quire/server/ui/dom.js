// Elements, icons and messages. Text always becomes text nodes; nothing is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v10H9zM15 9V5H5v10h4",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5",
  moon: "M20 14A8 8 0 0 1 10 4a8 8 0 1 0 10 10",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  chart: "M5 20V10M12 20V4M19 20v-7",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  close: "M6 6l12 12M18 6L6 18",
  clock: "M12 6a7.5 7.5 0 1 0 0 15 7.5 7.5 0 0 0 0-15M12 10v4l3 2M9 3h6",
};

/** Return an element. props: attributes; `class`, `on…` handlers and properties such as `value`. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return appendAll(element, children);
}

/** Append nested lists of children, one by one: a call takes only so many arguments. */
function appendAll(element, children) {
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of [["viewBox", "0 0 24 24"], ["class", "icon"], ["aria-hidden", "true"]]) svg.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Return a button that shows an icon. label: its name for people who do not see it. */
export function iconButton(name, label, onclick, extra = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  return appendAll(element, children);
}

/** Return a text in which each of the names is a button. */
export function withButtons(text, names, onPick) {
  const known = [...new Set(names)].filter(Boolean).sort((one, other) => other.length - one.length);
  if (!known.length) return [text];
  const pattern = new RegExp(`(${known.map((name) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`);
  return text.split(pattern).map((part, i) => (i % 2 ? h("button", { type: "button", class: "link name", onclick: () => onPick(part) }, part) : part));
}

export function toast(text) {
  const box = document.getElementById("toasts");
  const item = h("div", { class: "toast" }, text);
  box.append(item);
  setTimeout(() => item.remove(), 6000);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    toast(done ? "Copied" : "The browser blocked copying.");
  }
}

/** Return a file's download under a name. */
export function download(name, text) {
  const link = h("a", { download: name, href: URL.createObjectURL(new Blob([text], { type: "application/json" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const SEPARATOR = /\B(?=(\d{3})+(?!\d))/g;

/** Return a number for people: 12345.6 → "12,346". */
export function number(value, digits = 0) {
  if (!Number.isFinite(value)) return "–";
  const [whole, part] = value.toFixed(digits).split(".");
  return whole.replace(SEPARATOR, ",") + (part ? `.${part}` : "");
}

/** Return milliseconds for people: 0.41 ms, 38 ms, 2.15 s, 3 min 20 s. */
export function duration(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms < 10) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

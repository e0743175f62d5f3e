// Pictures of the engine view, on canvases that read their colours from the style sheet.

import { cellOwners, cells } from "./live.js";

const MAX_CELLS = 10_000;

let widths = new WeakMap();
const observer = globalThis.ResizeObserver && new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) widths.set(target, Math.round(contentRect.width));
});

/** Return the width of a canvas in CSS pixels. To read it from the canvas after each change of a text
 * would lay out the whole page each time. */
function widthOf(canvas) {
  const known = widths.get(canvas);
  if (known) return known;
  observer?.observe(canvas);
  widths.set(canvas, canvas.clientWidth);
  return canvas.clientWidth;
}

/** Return a canvas's context, sized for the screen, and its size in CSS pixels. */
function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = widthOf(canvas);
  const size = { width: Math.max(1, Math.round(width * ratio)), height: Math.max(1, Math.round(height * ratio)) };
  if (canvas.width !== size.width || canvas.height !== size.height) Object.assign(canvas, size);
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width + 1, height + 1);
  return { context, width };
}

let probe = null;
const colours = new Map();

/** Read colours and widths anew the next time: the theme or the window changed. */
export function forgetLook() {
  colours.clear();
  widths = new WeakMap();
}

/** Return a colour of the style sheet, in the present theme. */
function colour(name) {
  if (!colours.has(name)) colours.set(name, computed(name));
  return colours.get(name);
}

function computed(name) {
  if (!probe) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const NUM_SHADES = 5;

/** Draw the map of blocks. marked: key of the owner to frame, or null. Return where its cells are:
 * their side, cells per row, blocks per cell, and number of cells. */
export function drawMap(canvas, { blocks, owners, evicted, marked }) {
  const { each, letters } = cells(blocks, MAX_CELLS);
  const held = cellOwners(owners, each);
  const width = Math.max(1, widthOf(canvas));
  const side = Math.max(3, Math.min(22, Math.floor(Math.sqrt((width * 280) / Math.max(letters.length, 1)))));
  const perRow = Math.max(1, Math.floor(width / side));
  const { context } = prepared(canvas, Math.ceil(letters.length / perRow) * side || side);
  const ground = colour("--card");
  const states = Object.fromEntries([..."fcusp"].map((letter) => [letter, colour(`--block-${letter}`)]));
  const shades = Array.from({ length: NUM_SHADES }, (_, i) => colour(`--owner-${i}`));
  const size = side - (side > 5 ? 2 : 1);
  letters.forEach((letter, i) => {
    const x = (i % perRow) * side;
    const y = Math.floor(i / perRow) * side;
    context.fillStyle = letter === "u" ? shades[Number(held[i] ?? 0) % NUM_SHADES] : states[letter];
    context.fillRect(x, y, size, size);
    if (letter === "s" && side > 7) mark(context, x, y, size, ground); // no state is told by colour alone
    if (letter === "p" && side > 7) dot(context, x, y, size, ground);
  });
  const frame = (i, name) => {
    context.strokeStyle = colour(name);
    context.lineWidth = 1.5;
    context.strokeRect((i % perRow) * side + 0.75, Math.floor(i / perRow) * side + 0.75, size - 1.5, size - 1.5);
  };
  for (const cell of new Set(evicted.map((block) => Math.floor(block / each)))) frame(cell, "--bad");
  if (marked !== null) held.forEach((owner, i) => owner === marked && frame(i, "--text"));
  return { side, perRow, each, count: letters.length };
}

function mark(context, x, y, size, ground) {
  context.strokeStyle = ground;
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(x + 2, y + size - 2);
  context.lineTo(x + size - 2, y + 2);
  context.stroke();
}

function dot(context, x, y, size, ground) {
  context.fillStyle = ground;
  context.fillRect(x + size / 2 - 1.5, y + size / 2 - 1.5, 3, 3);
}

const STEP_PARTS = [["decode", "--decode"], ["accepted", "--accepted"], ["wasted", "--wasted"], ["prefill", "--prefill"]];

/** Draw steps as stacked bars of tokens, newest at the right, and their times as a line above. Return
 * the steps that fit, and the largest numbers of tokens and milliseconds. */
export function drawSteps(canvas, steps, height = 180) {
  const { context, width } = prepared(canvas, height);
  const bar = 5;
  const shown = steps.slice(-Math.floor(width / bar));
  const sum = (step) => STEP_PARTS.reduce((total, [name]) => total + step[name], 0);
  const top = Math.max(1, ...shown.map(sum));
  const topMs = Math.max(1e-9, ...shown.map(({ ms }) => ms));
  const base = height - 1;
  const parts = STEP_PARTS.map(([, name]) => colour(name));
  const left = (i) => width - (shown.length - i) * bar;
  shown.forEach((step, i) => {
    let y = base;
    STEP_PARTS.forEach(([name], part) => {
      if (!step[name]) return;
      // The root keeps steps of a few tokens visible beside large ones.
      const tall = Math.max(1, (step[name] / sum(step)) * Math.sqrt(sum(step) / top) * height * 0.72);
      y -= tall;
      context.fillStyle = parts[part];
      context.fillRect(left(i), y, bar - 1, tall);
      if (name === "wasted" && tall > 4) stripes(context, left(i), y, bar - 1, tall);
    });
  });
  context.strokeStyle = colour("--text");
  context.lineWidth = 1.25;
  context.beginPath();
  shown.forEach(({ ms }, i) => context.lineTo(left(i) + bar / 2, 2 + height * 0.24 * (1 - ms / topMs)));
  context.stroke();
  context.fillStyle = colour("--line");
  context.fillRect(0, base, width, 1);
  return { shown, top, topMs, bar };
}

function stripes(context, x, y, width, height) {
  context.fillStyle = colour("--card");
  for (let at = y + 2; at < y + height - 1; at += 4) context.fillRect(x, at, width, 1);
}

/** Draw a line of values over time. */
export function drawLine(canvas, values, name = "--decode", height = 36) {
  const { context, width } = prepared(canvas, height);
  if (values.length < 2) return;
  const top = Math.max(1e-9, ...values);
  context.strokeStyle = colour(name);
  context.lineWidth = 1.5;
  context.beginPath();
  values.forEach((value, i) => {
    const x = (i / (values.length - 1)) * width;
    const y = height - 2 - (value / top) * (height - 4);
    if (i) context.lineTo(x, y);
    else context.moveTo(x, y);
  });
  context.stroke();
}

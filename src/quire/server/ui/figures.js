// Pictures of the engine view, on canvases that read their colours from the style sheet.

import { cells } from "./live.js";

const MAX_CELLS = 10_000;

/** Return a canvas's context, sized for the screen, and its size in CSS pixels. */
function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

let probe = null;

/** Return a colour of the style sheet, in the present theme. */
function colour(name) {
  if (!probe) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** Draw the map of blocks, and return how many blocks a cell stands for. */
export function drawMap(canvas, text) {
  const { each, letters } = cells(text, MAX_CELLS);
  const width = Math.max(1, canvas.clientWidth);
  const side = Math.max(3, Math.min(16, Math.floor(Math.sqrt((width * 280) / Math.max(letters.length, 1)))));
  const perRow = Math.max(1, Math.floor(width / side));
  const { context } = prepared(canvas, Math.ceil(letters.length / perRow) * side || side);
  const ground = colour("--card");
  const colours = Object.fromEntries([..."fcusp"].map((letter) => [letter, colour(`--block-${letter}`)]));
  const gap = side > 5 ? 2 : 1;
  letters.forEach((letter, i) => {
    const x = (i % perRow) * side;
    const y = Math.floor(i / perRow) * side;
    context.fillStyle = colours[letter];
    context.fillRect(x, y, side - gap, side - gap);
    if (letter === "s" && side > 7) mark(context, x, y, side - gap, ground); // no state is told by colour alone
    if (letter === "p" && side > 7) dot(context, x, y, side - gap, ground);
  });
  return each;
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

/** Draw work of each quarter second as stacked bars, newest at the right. */
export function drawTicks(canvas, ticks, height = 180) {
  const { context, width } = prepared(canvas, height);
  const bar = 4;
  const shown = ticks.slice(-Math.floor(width / bar));
  const top = Math.max(1, ...shown.map(({ prompt, out }) => prompt + out));
  const scale = (height - 4) / top;
  const [decode, prefill] = [colour("--decode"), colour("--prefill")];
  shown.forEach(({ prompt, out }, i) => {
    const x = width - (shown.length - i) * bar;
    const low = out ? Math.max(1, out * scale) : 0;
    const high = prompt ? Math.max(1, prompt * scale) : 0;
    context.fillStyle = decode;
    context.fillRect(x, height - low, bar - 1, low);
    context.fillStyle = prefill;
    context.fillRect(x, height - low - high, bar - 1, high);
  });
  context.fillStyle = colour("--line");
  context.fillRect(0, height - 1, width, 1);
  return top;
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

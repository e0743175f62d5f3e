// Markdown as a tree of plain objects, and the tree as elements. No HTML is ever read: a model's
// tags are text. `parse` takes time in proportion to the length, whatever the text is.

const MAX_DEPTH = 6;
const MAX_EMPHASIS = 1000;
const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]{0,40})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s{0,12})(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Return the text with control characters made visible: terminals obey them, and those of
 * directions hide what a text says. */
export function visible(text) {
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (found) => String.fromCharCode(0x2400 + found.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (found) => `[U+${found.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** Return the blocks of a text. */
export function parse(text) {
  return blocks(visible(text.replace(/\r\n?/g, "\n")).split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const taken = fence(lines, at) ?? heading(lines, at) ?? quote(lines, at, depth) ?? list(lines, at, depth) ?? table(lines, at) ?? paragraph(lines, at);
    found.push(taken.block);
    at = taken.next;
  }
  return found;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, mark, language] = open;
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end += 1;
  return { block: { kind: "code", language, text: lines.slice(at + 1, end).join("\n") }, next: end + 1 };
}

function heading(lines, at) {
  if (RULE.test(lines[at])) return { block: { kind: "rule" }, next: at + 1 };
  const found = HEADING.exec(lines[at]);
  return found && { block: { kind: "heading", level: found[1].length, parts: inline(withoutMarks(found[2])) }, next: at + 1 };
}

/** Return the text of a heading without the signs that close it. */
function withoutMarks(text) {
  const whole = text.trimEnd();
  let end = whole.length;
  while (whole[end - 1] === "#") end -= 1;
  return /\s/.test(whole[end - 1] ?? "") ? whole.slice(0, end).trimEnd() : whole;
}

function quote(lines, at, depth) {
  if (depth >= MAX_DEPTH || !QUOTE.test(lines[at])) return null;
  let end = at;
  const inner = [];
  while (end < lines.length && QUOTE.test(lines[end])) inner.push(QUOTE.exec(lines[end++])[1]);
  return { block: { kind: "quote", blocks: blocks(inner, depth + 1) }, next: end };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= MAX_DEPTH) return null;
  const isOrdered = first[3] !== undefined;
  const indent = first[1].length;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    const isNext = item && item[1].length <= indent + 1 && (item[3] !== undefined) === isOrdered && !RULE.test(lines[end]);
    if (isNext) {
      items.push([item[4]]);
    } else if (lines[end].trim() && (leading(lines[end]) > indent || (lines[end - 1].trim() && !startsBlock(lines[end])))) {
      items.at(-1).push(lines[end].slice(Math.min(leading(lines[end]), indent + (isOrdered ? 3 : 2))));
    } else if (!lines[end].trim() && end + 1 < lines.length && (leading(lines[end + 1]) > indent || ITEM.test(lines[end + 1]))) {
      items.at(-1).push("");
    } else {
      break;
    }
    end += 1;
  }
  return { block: { kind: "list", isOrdered, start: Number(first[3] ?? 1), items: items.map((each) => blocks(each, depth + 1)) }, next: end };
}

function leading(line) {
  return line.length - line.trimStart().length;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function table(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || rule === undefined || rule.length > 2000 || !rule.includes("-") || !rule.includes("|") || !TABLE_RULE.test(rule)) return null;
  const head = cells(lines[at]);
  const aligns = cells(rule).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  if (aligns.length !== head.length) return null;
  let end = at + 2;
  const rows = [];
  while (end < lines.length && lines[end].includes("|")) rows.push(cells(lines[end++]));
  const partsOf = (row) => row.slice(0, head.length).map((cell) => inline(cell)); // a short row stays short
  return { block: { kind: "table", aligns, head: partsOf(head), rows: rows.map(partsOf) }, next: end };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split("|").map((cell) => cell.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) end += 1;
  return { block: { kind: "paragraph", parts: inline(lines.slice(at, end).join("\n").trim()) }, next: end };
}

/** Return the parts of a line: strings, and objects with a kind. */
export function inline(text, depth = 0) {
  const parts = [];
  let plain = 0;
  let at = 0;
  const ends = new Map();
  const next = (mark, from) => {
    let known = ends.get(mark);
    if (known === undefined || (known >= 0 && known < from)) ends.set(mark, (known = text.indexOf(mark, from)));
    return known;
  };
  const put = (part, from, to) => {
    if (from > plain) parts.push(text.slice(plain, from));
    parts.push(part);
    at = plain = to;
  };
  while (at < text.length) {
    const found = special(text, at, next, depth);
    if (found) put(found.part, at, found.end);
    else at += 1;
  }
  if (plain < text.length) parts.push(text.slice(plain));
  return parts;
}

function special(text, at, next, depth) {
  const sign = text[at];
  if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return { part: text[at + 1], end: at + 2 };
  if (sign === "`") return codeSpan(text, at, next);
  if (sign === "\n") return { part: { kind: "break" }, end: at + 1 };
  if (sign === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "")) return bareLink(text, at);
  if (depth >= MAX_DEPTH) return null;
  if (sign === "*" || sign === "_" || sign === "~") return emphasis(text, at, depth);
  if (sign === "[" || (sign === "!" && text[at + 1] === "[")) return link(text, at, next, depth);
  return null;
}

function codeSpan(text, at, next) {
  const width = runLength(text, at);
  const mark = "`".repeat(width);
  const end = next(mark, at + width);
  if (end < 0) return { part: text.slice(at, at + width), end: at + width };
  return { part: { kind: "codeSpan", text: text.slice(at + width, end) }, end: end + width };
}

function emphasis(text, at, depth) {
  const sign = text[at];
  const width = runLength(text, at);
  const skip = { part: text.slice(at, at + width), end: at + width };
  const opens = /\S/.test(text[at + width] ?? "") && !(sign === "_" && /\w/.test(text[at - 1] ?? ""));
  if (!opens || width > 3 || (sign === "~" && width !== 2)) return skip;
  const end = closing(text, sign, width, at + width);
  if (end < 0) return skip;
  const inner = inline(text.slice(at + width, end), depth + 1);
  const kinds = sign === "~" ? ["strike"] : { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] }[width];
  return { part: kinds.reduceRight((parts, kind) => [{ kind, parts }], inner)[0], end: end + width };
}

function runLength(text, at) {
  let width = 1;
  while (text[at + width] === text[at]) width += 1;
  return width;
}

/** Return where a run of `width` signs ends an emphasis; -1 if none does nearby. */
function closing(text, sign, width, from) {
  const limit = Math.min(text.length, from + MAX_EMPHASIS);
  for (let at = from; at < limit; at += 1) {
    if (text[at] !== sign) continue;
    const run = runLength(text, at);
    const ends = /\S/.test(text[at - 1]) && !(sign === "_" && /\w/.test(text[at + run] ?? ""));
    if (run === width && ends) return at;
    at += run - 1;
  }
  return -1;
}

function link(text, at, next, depth) {
  const start = text[at] === "!" ? at + 2 : at + 1;
  const middle = next("](", start);
  if (middle < 0 || middle - at > 2000) return null;
  const label = text.slice(start, middle);
  const end = next(")", middle + 2);
  if (end < 0 || end - middle > 2000 || label.includes("\n\n") || label.includes("[")) return null;
  const address = text.slice(middle + 2, end).trim().split(/\s/)[0];
  if (!SAFE_LINK.test(address)) return { part: text.slice(at, end + 1), end: end + 1 };
  return { part: { kind: "link", address, parts: inline(label || address, depth + 1) }, end: end + 1 };
}

function bareLink(text, at) {
  const found = /^https?:\/\/[^\s<>"'`()[\]]{1,1000}/.exec(text.slice(at, at + 1010));
  if (!found) return null;
  const address = found[0].replace(/[.,;:!?*_]+$/, "");
  return { part: { kind: "link", address, parts: [address] }, end: at + address.length };
}

// The tree of `markdown.js` as elements.

import { copyText, h, iconButton } from "../dom.js";
import { parse } from "./markdown.js";

/** Longest text that is shown at once; a button shows the rest, so that no answer stalls the page. */
export const MAX_SHOWN = 60_000;

const LEAVES = { em: "em", strong: "strong", strike: "s" };

function part(piece) {
  if (typeof piece === "string") return piece;
  if (piece.kind === "break") return h("br");
  if (piece.kind === "codeSpan") return h("code", {}, piece.text);
  if (piece.kind === "link") {
    const safe = { href: piece.address, target: "_blank", rel: "noopener noreferrer nofollow" };
    return h("a", safe, piece.parts.map(part));
  }
  return h(LEAVES[piece.kind], {}, piece.parts.map(part));
}

function codeBlock(text, language) {
  const copy = iconButton("copy", "Copy the code", () => copyText(text));
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language || "text"), copy), h("pre", { tabindex: "0" }, h("code", {}, text)));
}

function block(piece) {
  switch (piece.kind) {
    case "code":
      return codeBlock(piece.text, piece.language);
    case "heading":
      return h(`h${Math.min(piece.level + 2, 6)}`, {}, piece.parts.map(part));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, piece.blocks.map(block));
    case "list":
      return h(piece.isOrdered ? "ol" : "ul", piece.isOrdered && piece.start !== 1 ? { start: piece.start } : {}, piece.items.map((item) => h("li", {}, item.map((each) => (each.kind === "paragraph" && item.length === 1 ? each.parts.map(part) : block(each))))));
    case "table":
      return tableOf(piece);
    default:
      return h("p", {}, piece.parts.map(part));
  }
}

function tableOf(piece) {
  const row = (tag, cells) => h("tr", {}, cells.map((cell, i) => h(tag, { class: `to-${piece.aligns[i]}` }, cell.map(part))));
  return h("div", { class: "table-box", tabindex: "0" }, h("table", {}, h("thead", {}, row("th", piece.head)), h("tbody", {}, piece.rows.map((cells) => row("td", cells)))));
}

/** Show a text in an element. It keeps the elements of blocks that did not change, so an answer that
 * grows costs what its last block costs. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "markdown", dir: "auto" });
    this._shown = [];
    this._limit = MAX_SHOWN;
    this._text = "";
  }

  show(text) {
    this._text = text;
    const keys = [];
    const tree = parse(text.slice(0, this._limit));
    tree.forEach((piece, i) => {
      const key = JSON.stringify(piece);
      keys.push(key);
      if (this._shown[i] === key) return;
      const made = block(piece);
      const old = this.element.children[i];
      if (old) old.replaceWith(made);
      else this.element.append(made);
    });
    while (this.element.children.length > tree.length) this.element.lastChild.remove();
    if (text.length > this._limit) this._offerRest();
    this._shown = keys;
  }

  _offerRest() {
    const left = this._text.length - this._limit;
    const more = () => {
      this._limit += 10 * MAX_SHOWN;
      this.show(this._text);
    };
    this.element.append(h("button", { type: "button", class: "button", onclick: more }, `Show ${left.toLocaleString("en")} more characters`));
  }
}

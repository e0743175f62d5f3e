// The map of K/V blocks: states, owners, what was evicted just now, and a line on the block below the pointer.

import { drawMap } from "./figures.js";
import { fill, h, number } from "./dom.js";
import { counts, valueAt } from "./live.js";

const STATES = [
  ["u", "used", "Blocks that one sequence holds; each request has a shade."],
  ["s", "shared", "Blocks that several sequences hold (a stroke in each)."],
  ["p", "pinned", "Blocks of pinned prefixes (a dot in each)."],
  ["c", "cached", "Free blocks that hold a prefix for later prompts."],
  ["f", "free", "Empty blocks."],
];
const WORDS = {
  u: "used",
  s: "shared",
  p: "pinned",
  c: "cached: it holds tokens of a request that ended, for the next prompt that begins the same way, until its room is needed",
  f: "free",
};

/** Return the name of a request in the engine. Requests of other keys have none. */
export function nameOf(groups, key) {
  return groups?.[key]?.id ?? "a request of another key";
}

/** The map. onPick: takes the id of the request that holds the block that was clicked. */
export class BlockMap {
  constructor(onPick) {
    this._shown = null;
    this._key = "";
    this._place = null;
    this._marked = null;
    this._canvas = h("canvas", { class: "map", role: "img", "aria-label": "Map of K/V blocks" });
    this._legend = h("ul", { class: "legend" });
    this._note = h("p", { class: "hint" });
    this._pointed = h("p", { class: "hint pointed" }, "Point at a block, or at a request below, to see whose it is.");
    this._canvas.addEventListener("pointermove", (event) => this._point(event));
    this._canvas.addEventListener("pointerleave", () => this._mark(null));
    this._canvas.addEventListener("click", (event) => {
      this._point(event);
      const id = this._shown?.groups?.[this._marked]?.id;
      if (id) onPick(id);
    });
    this.elements = [this._canvas, this._legend, this._note, this._pointed];
  }

  /** Draw from scratch the next time: the size or the theme changed. */
  forget() {
    this._key = "";
  }

  show(shown) {
    this._shown = shown;
    const { blocks, engine, status } = shown;
    const found = counts(blocks);
    this._canvas.hidden = !blocks;
    const evicted = shown.evicted ?? [];
    const told = JSON.stringify([found, evicted.length]);
    if (told !== this._told) this._tell(found, evicted.length);
    this._told = told;
    if (!blocks) {
      this._note.textContent = "The engine has not sent its blocks yet.";
      return;
    }
    this._draw();
    const saved = engine.num_table_entries ? 1 - engine.num_used_blocks / engine.num_table_entries : 0;
    const size = status.capacity?.block_size;
    const each = this._place.each;
    const text = `${number(engine.num_blocks)} blocks${size ? ` of ${size} tokens` : ""}; ${each === 1 ? "a cell is a block" : `a cell is ${each} blocks, shown as the busiest`}${saved > 0.005 ? `; sharing saves ${(100 * saved).toFixed(0)} %` : ""}.`;
    if (this._note.textContent !== text) this._note.textContent = text;
  }

  /** Show how many blocks are in each state. */
  _tell(found, numEvicted) {
    fill(
      this._legend,
      STATES.map(([letter, label, words]) => h("li", { title: words, "data-state": letter, "data-count": String(found[letter]) }, h("span", { class: `swatch block-${letter}` }), `${label} ${number(found[letter])}`)),
      h("li", { title: "Blocks that lost a cached prefix in the last second (a frame around each).", "data-evicted": String(numEvicted) }, h("span", { class: "swatch evicted" }), `evicted just now ${number(numEvicted)}`),
    );
  }

  /** Frame the blocks of a request. id: its name, or null for none. */
  highlight(id) {
    const groups = Object.entries(this._shown?.groups ?? {});
    this._mark(id === null ? null : (groups.find(([, group]) => group.id === id)?.[0] ?? null));
  }

  _draw() {
    const { blocks, owners = "", evicted = [] } = this._shown;
    const key = `${blocks} ${owners} ${evicted} ${this._marked}`;
    if (key === this._key) return;
    this._key = key;
    this._place = drawMap(this._canvas, { blocks, owners, evicted, marked: this._marked });
  }

  _mark(key) {
    if (key === this._marked) return;
    this._marked = key;
    if (this._shown?.blocks) this._draw();
  }

  _point(event) {
    if (!this._place) return;
    const { side, perRow, each, count } = this._place;
    const cell = Math.floor(event.offsetY / side) * perRow + Math.floor(event.offsetX / side);
    if (event.offsetX >= perRow * side || cell < 0 || cell >= count) return;
    const block = cell * each;
    const { blocks, owners = "", evicted = [], groups } = this._shown;
    const owner = valueAt(owners, block);
    const words = [`Block ${number(block)}: ${WORDS[valueAt(blocks, block)]}`];
    if (owner && owner !== "0") words.push(`held by ${nameOf(groups, owner)}, which has ${number(groups?.[owner]?.blocks ?? 0)}`);
    if (evicted.includes(block)) words.push("lost a cached prefix just now");
    this._pointed.textContent = `${words.join("; ")}.`;
    this._mark(owner && owner !== "0" ? owner : null);
  }
}

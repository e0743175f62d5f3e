// The panel of parameters of a conversation.

import { PARAMETERS, parsed, parsedSchema } from "./answer.js";
import { h, iconButton } from "../dom.js";

const TOOL_EXAMPLE = JSON.stringify([{ type: "function", function: { name: "weather", description: "The weather at a place", parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] } } }], null, 2);
const SCHEMA_EXAMPLE = JSON.stringify({ type: "object", properties: { name: { type: "string" }, year: { type: "integer" } }, required: ["name", "year"], additionalProperties: false }, null, 2);

const OTHERS = [["system", "system prompt"], ["schema", "schema"], ["tools", "tools"], ["stop", "stop sequences"], ["logprobs", "token probabilities"]];

/** Return the names of the settings that are not the model's own. */
export function namesOfSet(settings) {
  const all = [...OTHERS, ...PARAMETERS.map(([name, label]) => [name, label.toLowerCase()])];
  return all.filter(([name]) => settings[name] !== undefined && String(settings[name]).trim()).map(([, label]) => label);
}

/** Return the panel. settings: changed in place. defaults: the model's own. */
export function settingsPanel(settings, defaults, onChange, onClose) {
  const set = (name, value) => {
    if (value === "" || value === false) delete settings[name];
    else settings[name] = value;
    onChange();
  };
  const numbers = PARAMETERS.map(([name, label, step, fallback]) => {
    const input = h("input", { type: "number", step: String(step), inputmode: "decimal", placeholder: String(defaults[name] ?? fallback), value: settings[name] ?? "", oninput: (event) => set(name, event.target.value) });
    return h("label", { class: "field small" }, h("span", { title: name }, label), input);
  });
  return [
    h("div", { class: "panel-head" }, h("h2", {}, "Parameters"), iconButton("close", "Close the parameters", onClose)),
    area("System prompt", settings.system, (value) => set("system", value), { rows: 4, placeholder: "How the model should behave" }),
    h("div", { class: "fields" }, numbers),
    area("Stop sequences, one per line", settings.stop, (value) => set("stop", value), { rows: 2, placeholder: "\\n stands for a line break" }),
    check("Token probabilities", settings.logprobs, (value) => set("logprobs", value)),
    json("JSON schema of answers", settings.schema, (value) => set("schema", value), SCHEMA_EXAMPLE, parsedSchema),
    json("Tools", settings.tools, (value) => set("tools", value), TOOL_EXAMPLE, (text) => parsed(text, "Tools")),
    h("p", { class: "hint" }, "An empty field leaves the model's default, which it shows in grey. The settings belong to this conversation; a new chat takes them over."),
  ];
}

function area(label, value, onInput, extra = {}) {
  return h("label", { class: "field" }, h("span", {}, label), h("textarea", { ...extra, value: value ?? "", spellcheck: "false", oninput: (event) => onInput(event.target.value) }));
}

function check(label, value, onInput) {
  return h("label", { class: "check" }, h("input", { type: "checkbox", checked: Boolean(value), onchange: (event) => onInput(event.target.checked) }), h("span", {}, label));
}

/** Return a field of JSON, with a fault below it, and an example to begin with. */
function json(label, value, onInput, example, read) {
  const fault = h("p", { class: "error", role: "alert", hidden: true });
  const input = h("textarea", { rows: "3", class: "mono", value: value ?? "", spellcheck: "false", "aria-label": label });
  const take = () => {
    onInput(input.value);
    judge();
  };
  const judge = () => {
    try {
      read(input.value);
      fault.hidden = true;
    } catch (error) {
      fault.textContent = error.message;
      fault.hidden = false;
    }
  };
  judge();
  input.addEventListener("input", take);
  const fillIn = () => {
    input.value = input.value.trim() ? "" : example;
    take();
  };
  return h("div", { class: "field" }, h("span", { class: "row" }, h("span", { class: "grow" }, label), h("button", { type: "button", class: "link", onclick: fillIn }, "Example / clear")), input, fault);
}

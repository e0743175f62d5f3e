// A request as a command and as a program, to copy.

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Return a command of curl. hasKey: whether the server wants a key, which is not written. */
export function asCurl(root, body, hasKey) {
  const lines = [`curl -N ${quoted(`${root}/v1/chat/completions`)}`, "  -H 'Content-Type: application/json'"];
  if (hasKey) lines.push('  -H "Authorization: Bearer $OPENAI_API_KEY"');
  lines.push(`  -d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n");
}

const OPENAI = new Set(["model", "messages", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty", "frequency_penalty", "tools", "response_format", "logprobs", "top_logprobs", "stream"]);

/** Return a program that uses the `openai` package. */
export function asPython(root, body, hasKey) {
  const own = Object.entries(body).filter(([name]) => !OPENAI.has(name) && name !== "stream_options");
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name) && name !== "stream");
  const fields = known.map(([name, value]) => `    ${name}=${python(value, 4)},`);
  if (own.length) fields.push(`    extra_body=${python(Object.fromEntries(own), 4)},`);
  const keyText = hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${root}/v1`)}, api_key=${keyText})`,
    "stream = client.chat.completions.create(",
    ...fields,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

/** Return the environment of programs that speak to an OpenAI or a Messages API. */
export function asEnvironment(root, model, hasKey) {
  const secret = hasKey ? "YOUR_KEY" : "none";
  return [`export OPENAI_BASE_URL=${quoted(`${root}/v1`)}`, `export OPENAI_API_KEY=${secret}`, `export ANTHROPIC_BASE_URL=${quoted(root)}`, `export ANTHROPIC_API_KEY=${secret}`, `export ANTHROPIC_MODEL=${quoted(model)}`, ""].join("\n");
}

/** Return a value as Python writes it. */
export function python(value, indent = 0) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const space = " ".repeat(indent + 4);
  const items = Array.isArray(value) ? value.map((each) => python(each, indent + 4)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (!items.length) return open + close;
  return `${open}\n${items.map((item) => `${space}${item},`).join("\n")}\n${" ".repeat(indent)}${close}`;
}

// The server, as the page calls it. The key stays in the tab: in a header, never in an address.

const KEY = "quire-key";

/** Address of the server, without a slash at its end. It may lie below a path. */
export const ROOT = new URL(".", import.meta.url).href.replace(/\/ui\/$/, "");

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A server that does not answer, or stopped in the middle of an answer. */
export class LostError extends ApiError {
  constructor(words) {
    super(0, words);
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

let asking = null;

/** Ask for a key, once for all that wait. It resolves when one was typed. */
function askForKey(wasRefused) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const input = document.getElementById("key-input");
    document.getElementById("key-error").hidden = !wasRefused;
    input.value = "";
    dialog.returnValue = "";
    dialog.addEventListener(
      "close",
      () => {
        if (dialog.returnValue === "use") key.set(input.value.trim());
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
    input.focus();
  });
  return asking;
}

/** Return the response. Raises ApiError with the server's own words. */
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const used = key.get();
    const headers = used ? { authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await reached(ROOT + path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey(used !== "" && used === key.get());
      continue;
    }
    throw new ApiError(response.status, await words(response));
  }
}

async function reached(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new LostError("The server does not answer. Is it still running?");
  }
}

async function words(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message ?? text;
  } catch {
    return text.slice(0, 500) || `status ${response.status}`;
  }
}

/** Return what a reader has next. Raises LostError if the connection broke. */
async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new LostError("The connection to the server broke before the end.");
  }
}

/** Yield the data of server-sent events, as they come. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await next(reader);
      if (done) return;
      held += value;
      let end;
      let start = 0;
      while ((end = held.indexOf("\n\n", start)) >= 0) {
        const event = held.slice(start, end);
        start = end + 2;
        if (event.startsWith("data: ")) yield event.slice(6);
      }
      held = held.slice(start);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

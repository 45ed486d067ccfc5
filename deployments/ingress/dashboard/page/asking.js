// Sends a chat request to this server and streams its answer. Errors are AskErrors, whose message is shown.

export class AskError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const KEY = "vitray-key";

// The API key is stored for this tab's session; if the browser has no storage, until the page is closed.
let keyHere = "";
export function key() {
  try { return sessionStorage.getItem(KEY) ?? keyHere; } catch { return keyHere; }
}
export function setKey(value) {
  keyHere = value;
  try { sessionStorage.setItem(KEY, value); } catch { /* kept above */ }
}

// Paths are relative to the page, which may have a route prefix. Throws AskError if the request fails.
export async function request(path, { body, signal } = {}) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new AskError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let told;
  try { told = (await response.json()).error?.message; } catch { told = null; }
  const after = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  return new AskError(told || `The server answered ${response.status}.`, {
    status: response.status,
    retryAfter: Number.isFinite(after) ? after : null,
  });
}

export async function firstModel() {
  const models = await (await request("v1/models")).json();
  return String(models.data[0].id);
}

export function chatBody(model, question, files) {
  const content = files.map(({ kind, data }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url: data } }));
  content.push({ type: "text", text: question });
  return { model, messages: [{ role: "user", content }], stream: true, stream_options: { include_usage: true } };
}

// Calls `head(serverTiming)` when the answer begins and `piece(text)` for each chunk; returns {finish, tokens}.
export async function ask(body, { signal, head, piece }) {
  const response = await request("v1/chat/completions", { body, signal });
  head(response.headers.get("server-timing") ?? "");
  const told = { finish: null, tokens: null };
  let done = false;
  for await (const data of events(response.body)) {
    done ||= data === "[DONE]";
    if (done) continue; // reads to the end of the stream: closing it early would cancel the request
    const found = JSON.parse(data);
    if (found.error) throw new AskError(String(found.error.message ?? "The answer broke off."));
    if (found.usage) told.tokens = found.usage.completion_tokens;
    const choice = found.choices?.[0];
    told.finish = choice?.finish_reason ?? told.finish;
    if (choice?.delta?.content) piece(choice.delta.content);
  }
  if (!done) throw new AskError("The answer broke off.");
  return told;
}

// Yields the data of each server-sent event.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The server's public API and nothing else. A key, where the server wants one, lives as long as the tab.

const KEY = "stagecoach-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

async function ask(path, body, signal) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError(0, { message: "the server cannot be reached" });
  });
  if (!response.ok) throw new ApiError(response.status, (await response.json().catch(() => ({}))).error);
  return response;
}

export const call = async (path, body, signal) => (await ask(path, body, signal)).json();

// The chunks of a stream (server-sent events). Closing it, by `signal` too, frees the row that speaks.
export async function* events(path, body, signal) {
  const response = await ask(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, { message: "the stream ended before the answer did" });
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // blank lines and pings
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(500, chunk.error);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already closed where the stream ended by itself
  }
}

// /tokenize, /detokenize and so on for one model.
export const tokenize = (model, prompt) => call("/tokenize", { model, prompt });
export const detokenize = (model, tokens) => call("/detokenize", { model, tokens });
export const applyTemplate = (model, messages, tools) => call("/apply-template", { model, messages, tools });

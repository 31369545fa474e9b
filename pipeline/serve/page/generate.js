// Answers and completions as they grow: text, calls, tokens with their alternatives, frames of a denoising, counts and times.

import { events } from "./api.js";
import { named, settings } from "./state.js";

export const ALTERNATIVES = 10;
const FRAME = 33; // milliseconds between two calls of `onChange`: a thousand tokens a second are not drawn one by one

function sampling(over) {
  const stop = settings.stop.split("\n").filter(Boolean);
  return {
    model: settings.model, temperature: settings.temperature, top_p: settings.top_p, seed: settings.seed,
    ...(settings.top_k > 0 && { top_k: settings.top_k }), ...(stop.length > 0 && { stop }),
    return_token_ids: true, ...over,
  };
}

function begun() {
  return { text: "", calls: [], tokens: [], frames: [], prompt: [], usage: null, finish: null, first: null, began: performance.now(), seconds: 0 };
}

// Tokens per second after the first token; of the whole request if the tokens arrived together.
export function speed(result) {
  const count = result.tokens.length;
  const seconds = result.seconds - (result.first ?? 0);
  if (seconds > 0.05) return count > 1 ? (count - 1) / seconds : 0;
  return result.seconds > 0 ? count / result.seconds : 0;
}

async function follow(path, body, signal, result, take, onChange) {
  let drawn = 0;
  try {
    for await (const chunk of events(path, body, signal)) {
      result.seconds = (performance.now() - result.began) / 1000;
      result.usage = chunk.usage ?? result.usage;
      if (chunk.prompt_token_ids) result.prompt = chunk.prompt_token_ids;
      if (chunk.denoising) result.frames.push(chunk.denoising);
      const choice = chunk.choices?.[0];
      if (choice) {
        if (choice.prompt_token_ids) result.prompt = choice.prompt_token_ids;
        take(choice);
        result.finish = choice.finish_reason ?? result.finish;
        if (result.tokens.length > 0) result.first ??= result.seconds;
      }
      if (performance.now() - drawn < FRAME) continue;
      drawn = performance.now();
      onChange(result);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    result.finish = "stopped";
  }
  onChange(result);
  return result;
}

const told = (entry) => ({ id: entry.id, text: entry.token, logprob: entry.logprob });

// An assistant's turn. `request` has messages, and what differs from the settings; `onChange(result)` is called as it grows.
export function answer(request, signal, onChange = () => {}) {
  const body = sampling({ max_completion_tokens: settings.max_tokens, stream_options: { include_usage: true }, ...request });
  if (named(body.model)?.meta.kind === "diffusion") body.stream_options.include_denoising = true; // and no log-probabilities
  else Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  const result = begun();
  const take = ({ delta, logprobs }) => {
    result.text += delta?.content ?? "";
    for (const piece of delta?.tool_calls ?? []) {
      const held = (result.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      held.id ||= piece.id ?? "";
      held.function.name ||= piece.function?.name ?? "";
      held.function.arguments += piece.function?.arguments ?? "";
    }
    for (const entry of logprobs?.content ?? []) {
      result.tokens.push({ ...told(entry), bytes: entry.bytes, top: entry.top_logprobs.map(told) });
    }
  };
  return follow("/v1/chat/completions", body, signal, result, take, onChange);
}

// Text completion, from text or from token ids.
export function complete(request, signal, onChange = () => {}) {
  const body = sampling({ max_tokens: settings.max_tokens, logprobs: ALTERNATIVES, stream_options: { include_usage: true }, ...request });
  const result = begun();
  const take = ({ text, logprobs, token_ids: ids }) => {
    result.text += text;
    (logprobs?.tokens ?? []).forEach((token, place) => {
      const top = Object.entries(logprobs.top_logprobs[place] ?? {}).map(([name, logprob]) => ({ text: name, logprob }));
      top.sort((one, other) => other.logprob - one.logprob);
      result.tokens.push({ id: ids?.[place], text: token, logprob: logprobs.token_logprobs[place], top });
    });
  };
  return follow("/v1/completions", body, signal, result, take, onChange);
}

// What all panels share: the models served, and how to sample. Changes are events: "models", "settings", "tokens", "conversation".

import { call } from "./api.js";

export const bus = new EventTarget();
export const tell = (name, detail) => bus.dispatchEvent(new CustomEvent(name, { detail }));
export const hear = (name, listener) => bus.addEventListener(name, (event) => listener(event.detail));

const STORED = "stagecoach-settings";
const DEFAULTS = {
  model: "", temperature: 0.7, top_p: 0.95, top_k: 0, max_tokens: 256, seed: 0, stop: "", system: "", tools: "", tool_choice: "auto",
};

function stored() {
  try {
    const held = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, typeof held[name] === typeof value ? held[name] : value]));
  } catch {
    return { ...DEFAULTS }; // not ours, or cut
  }
}

export const settings = stored();

export function change(name, value) {
  settings[name] = value;
  localStorage.setItem(STORED, JSON.stringify(settings));
  tell("settings", name);
}

export let models = [];
export const ofKind = (...kinds) => models.filter((model) => kinds.includes(model.meta.kind));
export const named = (id) => models.find((model) => model.id === id);

export async function loadModels() {
  models = (await call("/v1/models")).data;
  const speaking = ofKind("causal", "diffusion");
  if (!speaking.some((model) => model.id === settings.model)) change("model", speaking[0]?.id ?? "");
  tell("models");
}

// The tools of the settings' text. Throws an Error that says what is wrong and where.
export function readTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("expected a list: [{\"type\": \"function\", \"function\": {...}}]");
  if (tools.length > 64) throw new Error(`at most 64 tools, found ${tools.length}`);
  const names = new Set();
  tools.forEach((tool, place) => {
    const name = tool?.function?.name;
    const where = `tool ${place + 1}`;
    if (tool?.type !== "function") throw new Error(`${where}: expected "type": "function"`);
    if (typeof name !== "string" || !/^[a-zA-Z0-9_.-]{1,64}$/.test(name)) {
      throw new Error(`${where}: expected a name of 1 to 64 letters, digits, underscores, dots and dashes`);
    }
    if (names.has(name)) throw new Error(`${where}: ${name} appears twice`);
    names.add(name);
    const { parameters, description } = tool.function;
    if (description !== undefined && typeof description !== "string") throw new Error(`${name}: expected a text as description`);
    if (parameters !== undefined && (typeof parameters !== "object" || parameters === null || Array.isArray(parameters))) {
      throw new Error(`${name}: expected a JSON schema as parameters`);
    }
  });
  return tools;
}

// Elements from words: text is always text. The one place that makes HTML of a string is markdown.js.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

export const find = (id) => document.getElementById(id);

export function button(text, onclick, props = {}) {
  return h("button", { type: "button", onclick, ...props }, text);
}

let numFields = 0;

// A label that belongs to its input, whatever stands between them.
export function field(text, input, hint) {
  input.id ||= `field-${++numFields}`;
  return h("div", { class: "field" }, h("label", { for: input.id }, text), input, hint && h("small", {}, hint));
}

export function options(select, values, chosen) {
  select.replaceChildren(...values.map((value) => h("option", { value }, value)));
  if (values.includes(chosen)) select.value = chosen;
}

// What has happened, for eyes and screen readers; `complain` waits until it is closed.
export function say(text) {
  find("status").textContent = text;
}

export function complain(error) {
  if (error.name === "AbortError") return;
  const box = find("alert");
  box.replaceChildren(h("span", {}, error.message), button("Dismiss", () => (box.hidden = true)));
  box.hidden = false;
}

// Runs a handler's work and tells what goes wrong in it.
export const guarded = (work) => async (...given) => {
  try {
    find("alert").hidden = true;
    return await work(...given);
  } catch (error) {
    complain(error);
  }
};

export async function copy(text) {
  if (!navigator.clipboard) throw new Error("the browser allows copying only on https or localhost");
  await navigator.clipboard.writeText(text);
  say("Copied.");
}

// Enter sends where `plain`; Ctrl or Cmd with Enter always does.
export function sends(area, send, plain = false) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    if (!plain && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    send();
  });
}

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

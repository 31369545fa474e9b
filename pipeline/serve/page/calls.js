// The calls that a model makes, each as a card: what it wants, and a field for what you say came of it. Nothing is ever run.

import { button, field, h } from "./dom.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut by the token limit
  }
}

// Cards of an assistant's calls. While they are `open`, results can be written; `send(results)` gets {id, name, content} of each.
export function calls(called, open, send) {
  const areas = called.map(({ function: { name } }) => h("textarea", { rows: 3, class: "mono", spellcheck: "false", "aria-label": `Result of ${name}` }));
  const cards = called.map(({ function: { name, arguments: given } }, place) =>
    h("section", { class: "card", "aria-label": `Call of ${name}` },
      h("h3", {}, h("span", { class: "badge" }, "call"), " ", h("code", {}, name)),
      h("pre", { tabindex: 0 }, pretty(given)),
      open && field("Result", areas[place])));
  const collect = () => send(called.map(({ id, function: { name } }, place) => ({ id, name, content: areas[place].value })));
  return h("div", { class: "calls" }, cards,
    open && h("div", { class: "row" }, button(called.length > 1 ? "Send results" : "Send result", collect, { class: "primary" }),
      h("small", {}, "Nothing was run: enter what the tool would return.")));
}

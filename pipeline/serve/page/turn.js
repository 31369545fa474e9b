// One turn of a conversation on the screen: who spoke, what, how fast, its branches, and what may be done with it.

import { button, copy, guarded, h, number, sends } from "./dom.js";
import { collects, rewardText } from "./judge.js";
import { show } from "./markdown.js";
import { calls } from "./calls.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Result" };
const ENDS = { length: "cut: token limit", stopped: "stopped", error: "error" };

function facts({ message, meta }) {
  if (message.role === "tool") return [message.name];
  return [
    meta.model,
    meta.seed !== undefined && `seed ${meta.seed}`,
    meta.numNew !== undefined && `${number(meta.numNew)} tokens`,
    meta.speed > 0 && `${number(meta.speed, meta.speed < 100 ? 1 : 0)} tok/s`,
    ENDS[meta.finish],
  ].filter(Boolean);
}

// The element of a turn. `chat` does what its buttons ask for; `siblings` are all branches at its place, itself included.
export function turnElement(turn, siblings, last, chat) {
  const { role, content, tool_calls: called } = turn.message;
  const place = siblings.indexOf(turn);
  const body = h("div", { class: "text" });
  if (role === "tool") body.append(h("pre", { class: "result", tabindex: 0 }, content));
  else show(body, content);
  const actions = [
    siblings.length > 1 && h("span", { class: "branches", role: "group", "aria-label": "Branches" },
      button("‹", () => chat.go(siblings[place - 1]), { disabled: place === 0, "aria-label": "Previous branch" }),
      h("span", {}, `${place + 1} / ${siblings.length}`),
      button("›", () => chat.go(siblings[place + 1]), { disabled: place === siblings.length - 1, "aria-label": "Next branch" })),
    button("Edit", () => edit(turn, body, chat)),
    button("Copy", guarded(() => copy(content))),
    role === "assistant" && button("Regenerate", () => chat.regenerate(turn)),
    role !== "assistant" && last && button("Answer", () => chat.answer(turn)),
    turn.meta.tokens?.length > 0 && button("Tokens", () => chat.tokens(turn)),
    role === "assistant" && siblings.length > 1 && collects(turn.meta.model) &&
      button("Best of these", guarded(() => chat.prefer(turn, siblings)), { title: "Store that this answer is better than its other branches" }),
    role === "assistant" && (content.trim() || called) && collects(turn.meta.model) &&
      h("span", { class: "verdict", role: "group", "aria-label": "Verdict" }, verdict(turn, chat, true), verdict(turn, chat, false)),
  ];
  return h("article", { class: `turn ${role}`, "data-turn": turn.id, "aria-label": NAMES[role] },
    h("div", { class: "head" },
      h("strong", {}, NAMES[role]),
      h("span", { class: "facts" }, facts(turn).join(" · ")),
      turn.meta.reward !== undefined && h("span", { class: "badge reward", title: "comparable only between answers to one prompt" }, rewardText(turn.meta.reward))),
    body,
    turn.meta.error && h("p", { class: "error" }, turn.meta.error),
    called && calls(called, last, (results) => chat.results(turn, results)),
    h("div", { class: "actions" }, actions));
}

// Thumb up or down: pressed where this person has given it.
function verdict(turn, chat, desirable) {
  const name = desirable ? "Good" : "Bad";
  return button(name, guarded(() => chat.rate(turn, desirable)), {
    title: `Store that this answer is ${name.toLowerCase()}`,
    "aria-label": `${name} answer`,
    "aria-pressed": String(turn.meta.desirable === desirable),
  });
}

function edit(turn, body, chat) {
  const area = h("textarea", { rows: Math.min(16, turn.message.content.split("\n").length + 1), value: turn.message.content, "aria-label": "Edit this turn" });
  const save = () => chat.edit(turn, area.value);
  area.addEventListener("keydown", (event) => event.key === "Escape" && chat.draw());
  sends(area, save);
  body.replaceChildren(area, h("div", { class: "row" },
    button(turn.message.role === "assistant" ? "Save as a branch" : "Send as a branch", save, { class: "primary" }),
    button("Cancel", () => chat.draw())));
  area.focus();
}

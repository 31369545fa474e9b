// Markdown in its place: rendered and cleaned by the server (/render). The only file that makes HTML of a string.

import { call } from "./api.js";
import { button, copy, guarded, h } from "./dom.js";

const LIMIT = 50_000; // characters the server renders; a longer text stays plain
const known = new Map();
let last = Promise.resolve();

// One text after another: the server gives one who asks few places at once, and a long conversation has many texts.
function html(text) {
  const found = last.then(async () => {
    if (!known.has(text)) {
      if (known.size > 500) known.delete(known.keys().next().value);
      known.set(text, (await call("/render", { markdown: text })).html);
    }
    return known.get(text);
  });
  last = found.catch(() => {});
  return found;
}

function put(place, markup) {
  place.innerHTML = markup;
  place.classList.remove("plain");
  for (const link of place.querySelectorAll("a")) link.target = "_blank";
  for (const table of place.querySelectorAll("table")) {
    const frame = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of place.querySelectorAll("pre")) {
    const language = pre.firstElementChild?.className.replace("language-", "") || "code";
    const text = pre.textContent;
    const bar = h("div", { class: "bar" }, h("span", {}, language), button("Copy", guarded(() => copy(text)), { "aria-label": "Copy code" }));
    const frame = h("div", { class: "fence" });
    pre.tabIndex = 0; // it scrolls, so a keyboard must get there
    pre.replaceWith(frame);
    frame.append(bar, pre);
  }
}

// Show a whole text: plain at once, rendered when the server has done so. What cannot be rendered stays plain.
export async function show(place, text) {
  if (known.has(text)) return put(place, known.get(text));
  place.textContent = text;
  place.classList.add("plain");
  if (!text.trim() || text.length > LIMIT) return;
  try {
    put(place, await html(text));
  } catch {
    place.title = "shown as plain text: the server could not render it";
  }
}

// Where the last finished paragraph or fence of a text that still grows ends.
export function finished(text) {
  let end = 0;
  let fence = "";
  let start = 0;
  while (start < text.length) {
    const stop = text.indexOf("\n", start);
    if (stop < 0) break; // the last line may still change
    const line = text.slice(start, stop);
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1] ?? "";
    if (fence) {
      if (mark.startsWith(fence) && !line.trim().slice(mark.length)) {
        fence = "";
        end = stop + 1;
      }
    } else if (mark) fence = mark;
    else if (!line.trim()) end = stop + 1;
    start = stop + 1;
  }
  return end;
}

// A text that grows: finished paragraphs and fences are rendered, the rest is plain until they are, or until `end`.
export class Growing {
  constructor(place) {
    this.place = place;
    this.shown = 0;
    this.rest = h("div", { class: "plain" });
    this.last = Promise.resolve();
    place.replaceChildren(this.rest);
  }

  grow(text) {
    const end = finished(text);
    if (end > this.shown) {
      const block = h("div");
      this.rest.before(block);
      const piece = text.slice(this.shown, end);
      block.textContent = piece;
      block.className = "plain";
      this.last = this.last.then(() => show(block, piece)); // one at a time
      this.shown = end;
    }
    this.rest.textContent = text.slice(this.shown);
  }

  async end(text) {
    await this.last;
    const whole = h("div");
    await show(whole, text);
    this.place.replaceChildren(whole);
  }
}

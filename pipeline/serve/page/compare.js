// <compare-panel>: two checkpoints, seeds or temperatures answer one prompt side by side. With one seed they share their noise
// (a token is chosen by a number of seed and place), so the first token that differs is where the two really part.

import { button, complain, guarded, h, options, say, sends } from "./dom.js";
import { answer, speed } from "./generate.js";
import { collects, judge, prefer, rewardText, score } from "./judge.js";
import { hear, ofKind, readTools, settings, tell } from "./state.js";

const SIDES = ["A", "B"];

// The first place where two lists of tokens differ; where one is the other's beginning, its length.
export function parting(first, second) {
  const same = (one, other) => (one.id !== undefined && other.id !== undefined ? one.id === other.id : one.text === other.text);
  const most = Math.min(first.length, second.length);
  for (let place = 0; place < most; place += 1) if (!same(first[place], second[place])) return place;
  return first.length === second.length ? -1 : most;
}

// Their text: bytes joined first, since a character may lie in several tokens.
const joined = (tokens) => new TextDecoder().decode(Uint8Array.from(tokens.flatMap((token) => token.bytes ?? [])));

class ComparePanel extends HTMLElement {
  connectedCallback() {
    this.prompt = h("textarea", { rows: 3, "aria-label": "Prompt for both", placeholder: "A prompt for both. Ctrl+Enter sends." });
    this.asks = button("Ask both", guarded(() => this.ask()), { class: "primary" });
    this.stops = button("Stop", () => this.running?.abort(), { hidden: true });
    this.sides = SIDES.map((name) => this.side(name));
    this.verdicts = h("div", { class: "row verdicts", role: "group", "aria-label": "Which is better?", hidden: true },
      button("A is better", guarded(() => this.judge(0))),
      button("Tie", guarded(() => this.judge(null))),
      button("B is better", guarded(() => this.judge(1))));
    this.outcome = h("p", { class: "muted outcome", role: "status" });
    this.append(h("div", { class: "pad" }, h("h2", {}, "Compare"), this.prompt,
      h("div", { class: "row" }, this.asks, this.stops), this.outcome,
      h("div", { class: "sides" }, this.sides.map((side) => side.element)), this.verdicts));
    sends(this.prompt, () => this.asks.click());
    this.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    hear("models", () => this.fill());
    this.fill();
  }

  side(name) {
    const model = h("select", { "aria-label": `Model ${name}` });
    const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.05, value: settings.temperature, "aria-label": `Temperature ${name}` });
    const seed = h("input", { type: "number", min: 0, step: 1, value: settings.seed, "aria-label": `Seed ${name}` });
    const text = h("div", { class: "said plain", tabindex: 0, role: "region", "aria-label": `Answer ${name}` });
    const facts = h("p", { class: "facts" });
    const element = h("section", { class: "answer card", "aria-label": `Side ${name}` },
      h("h3", {}, name),
      h("div", { class: "row" }, h("label", { class: "inline" }, "Model ", model),
        h("label", { class: "inline" }, "Temp ", temperature), h("label", { class: "inline" }, "Seed ", seed)),
      text, facts);
    return { name, model, temperature, seed, text, facts, element, result: null };
  }

  fill() {
    const ids = ofKind("causal", "diffusion").map((model) => model.id);
    this.sides.forEach((side, place) => options(side.model, ids, side.model.value || (place ? ids.find((id) => id !== settings.model) : settings.model) || ids[0]));
  }

  async ask() {
    if (!this.prompt.value.trim() || this.running) return;
    const running = (this.running = new AbortController());
    const messages = [{ role: "user", content: this.prompt.value }];
    if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
    this.asked = { messages, tools: readTools(settings.tools) };
    this.verdicts.hidden = true;
    this.busy(true);
    for (const side of this.sides) Object.assign(side, { result: null, asked: side.model.value });
    try {
      await Promise.all(this.sides.map((side) => this.run(side, running)));
      this.compare();
    } catch (error) {
      running.abort();
      complain(error);
    } finally {
      this.running = null;
      this.busy(false);
    }
  }

  busy(is) {
    this.asks.disabled = is;
    this.stops.hidden = !is;
    for (const side of this.sides) side.text.setAttribute("aria-busy", is);
    if (is) this.outcome.textContent = "";
  }

  async run(side, running) {
    side.text.textContent = side.facts.textContent = "";
    const { messages, tools } = this.asked;
    const request = { model: side.asked, messages, temperature: side.temperature.valueAsNumber || 0, seed: side.seed.valueAsNumber || 0, ...(tools.length > 0 && { tools, tool_choice: settings.tool_choice }) };
    side.result = await answer(request, running.signal, (now) => (side.text.textContent = now.text));
    const { result } = side;
    side.message = { role: "assistant", content: result.text, ...(result.calls.length > 0 && { tool_calls: result.calls }) };
    const facts = [`${result.tokens.length} tokens`, `${speed(result).toFixed(0)} tok/s`];
    const reward = judge() && result.finish !== "stopped" ? await score([...messages, side.message], tools) : undefined;
    if (reward !== undefined) facts.push(rewardText(reward));
    side.facts.textContent = facts.join(" · ");
  }

  compare() {
    const [first, second] = this.sides.map((side) => side.result);
    const place = first.tokens.length && second.tokens.length ? parting(first.tokens, second.tokens) : first.text === second.text ? -1 : 0;
    for (const side of this.sides) {
      const spoken = side.result.tokens;
      if (place >= 0 && spoken.length) {
        const mark = h("mark", { title: "the first token that differs" }, place < spoken.length ? joined([spoken[place]]) : "∎");
        side.text.replaceChildren(joined(spoken.slice(0, place)), mark, joined(spoken.slice(place + 1)));
      }
      side.element.querySelector(".open")?.remove();
      const { result, asked } = side;
      if (spoken.length) side.element.append(button("Tokens", () => {
        tell("tokens", { model: asked, prompt: result.prompt, tokens: result.tokens, text: result.text });
        document.getElementById("tab-tokens").click();
      }, { class: "open" }));
    }
    const differ = JSON.stringify(this.sides[0].message) !== JSON.stringify(this.sides[1].message);
    this.outcome.textContent = place < 0 ? "Both answers are the same." : `They diverge at token ${place + 1}.`;
    this.verdicts.hidden = !differ;
    say(this.outcome.textContent);
  }

  async judge(better) {
    this.verdicts.hidden = true;
    if (better === null) {
      this.outcome.textContent = "A tie: nothing stored, since a pair needs a better answer.";
      return;
    }
    const [chosen, rejected] = [this.sides[better], this.sides[1 - better]];
    if (!collects(chosen.asked)) {
      this.outcome.textContent = `${chosen.name} is better. Not stored: start the server with --feedback FILE.`;
      return;
    }
    const found = await prefer(chosen.asked, this.asked.messages, chosen.message, rejected.message, this.asked.tools);
    this.outcome.textContent = `${chosen.name} is better: ${found.stored ? "stored" : "stored before"}, ${found.count} in all.`;
  }
}

customElements.define("compare-panel", ComparePanel);

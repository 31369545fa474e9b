// <diffusion-panel>: how a masked-diffusion model writes, step by step: all places at once, the surest first.

import { detokenize } from "./api.js";
import { button, complain, field, guarded, h, options, sends } from "./dom.js";
import { answer } from "./generate.js";
import { hear, ofKind } from "./state.js";
import { visible } from "./tokens.js";

const MILLISECONDS = 120; // a frame, when it is played

class DiffusionPanel extends HTMLElement {
  connectedCallback() {
    this.frames = [];
    this.texts = new Map(); // "model id" -> text
    this.model = h("select");
    this.prompt = h("textarea", { rows: 3, "aria-label": "Prompt", placeholder: "A prompt. Ctrl+Enter sends." });
    this.go = button("Denoise", guarded(() => this.run()), { class: "primary" });
    this.stops = button("Stop", () => this.running?.abort(), { hidden: true });
    this.slider = h("input", { type: "range", min: 0, max: 0, step: 1, value: 0, oninput: () => this.draw(Number(this.slider.value)) });
    this.plays = button("Play", () => this.play(), { disabled: true });
    this.facts = h("p", { class: "facts", role: "status" });
    this.grid = h("div", { class: "pieces grid", tabindex: 0, role: "region", "aria-label": "Tokens of this step" });
    this.append(h("div", { class: "pad" }, h("h2", {}, "Denoise"), field("Model", this.model), this.prompt,
      h("div", { class: "row" }, this.go, this.stops, this.plays, h("label", { class: "inline wide" }, "Step ", this.slider)), this.facts, this.grid));
    sends(this.prompt, () => this.go.click());
    const fill = () => options(this.model, ofKind("diffusion").map((model) => model.id), this.model.value);
    hear("models", fill);
    fill();
  }

  async run() {
    if (this.running || !this.prompt.value.trim()) return;
    const running = (this.running = new AbortController());
    this.asked = this.model.value;
    this.frames = [];
    this.busy(true);
    try {
      const request = { model: this.asked, messages: [{ role: "user", content: this.prompt.value }] };
      await answer(request, running.signal, ({ frames }) => {
        if (frames.length === this.frames.length) return;
        this.frames = [...frames];
        this.slider.max = frames.length - 1;
        this.slider.value = frames.length - 1;
        this.draw(frames.length - 1);
      });
    } catch (error) {
      complain(error);
    } finally {
      this.running = null;
      this.busy(false);
    }
  }

  busy(is) {
    this.go.disabled = is;
    this.stops.hidden = !is;
    this.plays.disabled = is || !this.frames.length;
  }

  draw(at) {
    const frame = this.frames[at];
    const known = frame.tokens.filter((id) => id !== null).length;
    this.facts.textContent = `Step ${frame.step} of ${frame.steps}: ${known} of ${frame.tokens.length} tokens unmasked, starting at position ${frame.offset}`;
    const before = this.frames[at - 1]?.offset === frame.offset ? this.frames[at - 1].tokens : [];
    this.grid.replaceChildren(...frame.tokens.map((id, place) => {
      if (id === null) return h("span", { class: "piece masked", "aria-label": "masked" }, "···");
      const cell = h("span", { class: before[place] === id ? "piece" : "piece new", title: `id ${id}` }, "…");
      this.textOf(id).then((text) => (cell.textContent = visible(text)), complain);
      return cell;
    }));
  }

  // A token's text, asked for once.
  textOf(id) {
    const name = `${this.asked} ${id}`;
    if (!this.texts.has(name)) this.texts.set(name, detokenize(this.asked, [id]).then((found) => found.prompt));
    return this.texts.get(name);
  }

  play() {
    clearInterval(this.timer);
    let at = 0;
    this.timer = setInterval(() => {
      if (at === this.frames.length) return clearInterval(this.timer);
      this.slider.value = at;
      this.draw(at++);
    }, MILLISECONDS);
  }
}

customElements.define("diffusion-panel", DiffusionPanel);

// <fim-panel>: fill in the middle. What stands before and behind goes in, what belongs between comes out.

import { button, complain, field, guarded, h, say, sends } from "./dom.js";
import { complete, speed } from "./generate.js";

class FimPanel extends HTMLElement {
  connectedCallback() {
    const area = (rows, value) => h("textarea", { rows, value, class: "mono", spellcheck: "false" });
    this.before = area(8, "def add(left, right):\n    ");
    this.behind = area(4, "\n\nprint(add(1, 2))\n");
    this.middle = h("pre", { class: "middle", tabindex: 0, role: "region", "aria-label": "Insertion", "aria-live": "polite" });
    this.go = button("Fill in", guarded(() => this.fill()), { class: "primary" });
    this.stops = button("Stop", () => this.running?.abort(), { hidden: true });
    this.take = button("Accept", () => this.accept(), { disabled: true });
    this.drop = button("Discard", () => this.set(""), { disabled: true });
    this.facts = h("p", { class: "facts", role: "status" });
    this.append(h("div", { class: "pad narrow" }, h("h2", {}, "Fill in the middle"),
      field("Prefix", this.before), this.middle, field("Suffix", this.behind),
      h("div", { class: "row" }, this.go, this.stops, this.take, this.drop), this.facts));
    for (const one of [this.before, this.behind]) sends(one, () => this.go.click());
    this.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
  }

  set(text) {
    this.middle.textContent = text;
    this.take.disabled = this.drop.disabled = !text;
  }

  accept() {
    this.before.value += this.middle.textContent;
    this.set("");
    this.before.focus();
  }

  async fill() {
    if (this.running) return;
    const running = (this.running = new AbortController());
    this.set("");
    this.busy(true);
    try {
      const result = await complete({ prompt: this.before.value, suffix: this.behind.value }, running.signal, (now) => (this.middle.textContent = now.text));
      this.set(result.text);
      this.facts.textContent = `${result.tokens.length} tokens, ${speed(result).toFixed(0)} tok/s${result.finish === "length" ? ", cut: token limit" : ""}`;
      say("Filled in.");
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
    this.middle.setAttribute("aria-busy", is);
  }
}

customElements.define("fim-panel", FimPanel);

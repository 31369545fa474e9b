// <tokens-panel>: how sure the model was of each token, what else it might have said, and what would have come of that.

import { tokenize } from "./api.js";
import { button, complain, guarded, h, number, say, sends } from "./dom.js";
import { complete, speed } from "./generate.js";
import { hear, settings } from "./state.js";

const probability = (token) => Math.exp(token.logprob ?? 0);
const percent = (share) => `${number(100 * share, share < 0.1 ? 1 : 0)}%`;

// A token's text with its white space to be seen.
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";

class TokensPanel extends HTMLElement {
  connectedCallback() {
    this.shown = { model: "", prompt: [], tokens: [] };
    this.input = h("textarea", { rows: 3, "aria-label": "Text to continue", placeholder: "Text for the model to continue, without a chat template. Ctrl+Enter sends." });
    this.go = button("Continue the text", guarded(() => this.run({ prompt: this.input.value }, [])), { class: "primary" });
    this.stops = button("Stop", () => this.running?.abort(), { hidden: true });
    this.facts = h("p", { class: "facts" }, "Ask in Chat and press Tokens below an answer, or continue a text here.");
    this.map = h("div", { class: "heat", role: "listbox", "aria-label": "Tokens of the answer", tabindex: 0 });
    this.detail = h("div", { class: "detail" });
    this.append(h("div", { class: "pad" }, h("h2", {}, "Tokens"), this.input, h("div", { class: "row" }, this.go, this.stops),
      this.facts, h("div", { class: "legend", "aria-hidden": "true" }, "sure", h("span", { class: "ramp" }), "unsure"),
      h("div", { class: "halves" }, this.map, this.detail)));
    sends(this.input, () => this.go.click());
    this.map.addEventListener("click", (event) => this.select(Number(event.target.dataset.place ?? NaN)));
    this.map.addEventListener("keydown", (event) => this.key(event));
    this.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    hear("tokens", (shown) => this.show(shown));
  }

  show(shown) {
    this.running?.abort();
    this.shown = shown;
    this.input.value = "";
    this.draw();
  }

  draw() {
    const { tokens, kept = 0 } = this.shown;
    this.place = NaN;
    this.detail.replaceChildren(tokens.length ? h("p", { class: "muted" }, "Choose a token: click, or arrow keys.") : "");
    this.map.replaceChildren(...tokens.flatMap((token, place) => {
      const share = probability(token);
      const node = h("span", { role: "option", id: `token-${place}`, "data-place": place, "aria-selected": "false", class: place === kept - 1 ? "token forced" : "token",
        "aria-label": `${visible(token.text)} ${percent(share)}`, title: `${percent(share)}  id ${token.id ?? "?"}` }, visible(token.text));
      node.style.setProperty("--doubt", `${Math.round(100 * (1 - share))}%`);
      return token.text.includes("\n") ? [node, h("br")] : [node];
    }));
    this.map.removeAttribute("aria-activedescendant");
    if (tokens.length) this.tell();
  }

  tell(result) {
    const { tokens, model } = this.shown;
    const mean = tokens.reduce((sum, token) => sum + (token.logprob ?? 0), 0) / tokens.length;
    const parts = [model, `${number(tokens.length)} tokens`, `mean log p ${number(mean, 3)}`, `perplexity ${number(Math.exp(-mean), 2)}`];
    if (result && speed(result)) parts.push(`${number(speed(result))} tok/s`);
    this.facts.textContent = parts.join(" · ");
  }

  key(event) {
    const last = this.shown.tokens.length - 1;
    const at = Number.isNaN(this.place) ? -1 : this.place;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Enter" && at >= 0) this.detail.querySelector("button:not([disabled])")?.focus();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.select(Math.min(Math.max(to, 0), last));
  }

  select(place) {
    const token = this.shown.tokens[place];
    if (!token) return;
    this.map.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const node = this.map.querySelector(`#token-${place}`);
    node.setAttribute("aria-selected", "true");
    node.scrollIntoView({ block: "nearest" });
    this.map.setAttribute("aria-activedescendant", node.id);
    this.place = place;
    const rows = token.top.map((other) => this.alternative(other, token, place));
    this.detail.replaceChildren(
      h("h3", {}, `Token ${place + 1}: `, h("code", {}, visible(token.text)), ` ${percent(probability(token))}`),
      h("table", {}, h("thead", {}, h("tr", {}, ["instead", "p", "id", ""].map((name) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "Go on"))))),
        h("tbody", {}, rows)));
  }

  alternative(other, token, place) {
    const share = probability(other);
    const bar = h("span", { class: "bar-p" });
    bar.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
    const said = other.id === undefined ? other.text === token.text : other.id === token.id;
    return h("tr", { class: said ? "taken" : "" },
      h("td", {}, h("code", {}, visible(other.text))), h("td", { class: "p" }, bar, percent(share)), h("td", {}, other.id ?? ""),
      h("td", {}, button("Continue", guarded(() => this.branch(place, other)), { "aria-label": `Continue from here with ${visible(other.text)}` })));
  }

  // Take another token at a place, keep what stands before it, and let the model go on: by ids, so no token is cut anew.
  async branch(place, other) {
    const { prompt, tokens, model } = this.shown;
    const id = other.id ?? (await this.idOf(model, other.text));
    const kept = [...tokens.slice(0, place), { ...other, id, top: tokens[place].top }];
    if (kept.some((token) => token.id === undefined)) throw new Error("the ids of these tokens are not known");
    await this.run({ model, prompt: [...prompt, ...kept.map((token) => token.id)] }, kept, prompt);
  }

  // Completions name alternatives by text: the one token that spells it.
  async idOf(model, text) {
    const { tokens } = await tokenize(model, text);
    if (tokens.length !== 1) throw new Error(`${visible(text)} is not a single token as text, so you cannot continue from it`);
    return tokens[0];
  }

  async run(request, kept, prompt) {
    if (this.running || !request.prompt.length) return;
    const running = (this.running = new AbortController());
    const model = request.model ?? settings.model;
    this.busy(true);
    try {
      const result = await complete({ ...request, model }, running.signal, (now) => {
        this.facts.textContent = `${number(now.tokens.length)} tokens, ${number(speed(now))} tok/s`;
      });
      this.shown = { model, prompt: prompt ?? result.prompt, tokens: [...kept, ...result.tokens], kept: kept.length };
      this.draw();
      if (this.shown.tokens.length) this.tell(result);
      say(`${result.tokens.length} more tokens.`);
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
    this.map.setAttribute("aria-busy", is);
  }
}

customElements.define("tokens-panel", TokensPanel);

// <template-panel>: the conversation as the model reads it, token by token; or any text as the tokenizer cuts it.

import { applyTemplate, tokenize } from "./api.js";
import { button, field, find, guarded, h, number, options } from "./dom.js";
import { hear, named, readTools, settings } from "./state.js";
import { visible } from "./tokens.js";

class TemplatePanel extends HTMLElement {
  connectedCallback() {
    this.source = h("select", { onchange: guarded(() => this.draw()) });
    options(this.source, ["The conversation", "A text"], "The conversation");
    this.borders = h("input", { type: "checkbox", checked: true, onchange: () => this.shown.classList.toggle("bordered", this.borders.checked) });
    this.ids = h("input", { type: "checkbox", onchange: () => this.shown.classList.toggle("numbered", this.ids.checked) });
    this.text = h("textarea", { rows: 4, class: "mono", spellcheck: "false", oninput: guarded(() => this.draw()) });
    this.typed = field("Text", this.text);
    this.facts = h("p", { class: "facts", role: "status" });
    this.shown = h("div", { class: "pieces bordered", tabindex: 0, role: "region", "aria-label": "Prompt" });
    this.append(h("div", { class: "pad" }, h("h2", {}, "Template"),
      h("div", { class: "row" }, h("label", { class: "inline" }, "Show ", this.source),
        h("label", { class: "inline" }, this.borders, " token borders"), h("label", { class: "inline" }, this.ids, " ids"),
        button("Refresh", guarded(() => this.draw()))),
      this.typed, this.facts, this.shown));
    this.typed.hidden = true;
    const draw = guarded(() => this.draw());
    for (const name of ["conversation", "settings", "models", "panel"]) hear(name, () => this.hidden || draw());
  }

  async draw() {
    const whole = this.source.value === "The conversation";
    this.typed.hidden = whole;
    const { conversation } = find("chat");
    const last = conversation?.path().at(-1);
    if (!settings.model || (whole && !last && !settings.system)) {
      this.facts.textContent = "Send a message in Chat first, or show a text.";
      return this.shown.replaceChildren();
    }
    const asked = (this.asked = whole
      ? applyTemplate(settings.model, conversation.messages(last ?? null, settings.system), readTools(settings.tools))
      : tokenize(settings.model, this.text.value));
    const { pieces } = await asked;
    if (asked !== this.asked) return; // a later one is under way
    const specials = pieces.filter((piece) => piece.special).length;
    this.facts.textContent = `${number(pieces.length)} tokens, ${number(specials)} of them special, of ${number(named(settings.model).meta.context)}`;
    this.shown.replaceChildren(...pieces.flatMap(({ id, text, special }) => {
      const piece = h("span", { class: special ? "piece special" : "piece", title: `id ${id}` }, visible(text), h("sub", {}, id));
      return text.includes("\n") ? [piece, h("br")] : [piece];
    }));
  }
}

customElements.define("template-panel", TemplatePanel);

// <settings-panel>: the sampling settings, the system prompt, the tools' editor with its check, the API key.

import { key } from "./api.js";
import { button, complain, field, guarded, h, options, say } from "./dom.js";
import { change, hear, loadModels, named, readTools, settings } from "./state.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0: the likeliest"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, max: 1000000, step: 1 }, "0: all"],
  ["max_tokens", "Tokens at most", { min: 1, max: 1000000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 9007199254740991, step: 1 }, "one seed, one answer"],
];

const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

class SettingsPanel extends HTMLElement {
  connectedCallback() {
    this.fields = {};
    this.check = h("p", { class: "check", id: "tools-check", role: "status" });
    const texts = [
      this.area("system", "System prompt", 3),
      this.area("stop", "Stop strings, one per line", 2),
    ];
    const tools = this.area("tools", "Tools (JSON)", 8, { spellcheck: "false", class: "mono", "aria-describedby": "tools-check" });
    const choice = h("select", { onchange: () => change("tool_choice", choice.value) });
    options(choice, ["auto", "none", "required"], settings.tool_choice);
    const secret = h("input", { type: "password", autocomplete: "off", value: key.get(), onchange: guarded(() => this.unlock(secret.value)) });
    this.about = h("p", { class: "muted", id: "about-model" });
    this.append(
      h("h2", {}, "Settings"), this.about,
      h("div", { class: "pair" }, NUMBERS.map((one) => this.number(...one))),
      ...texts, tools, this.check,
      h("div", { class: "row" },
        button("Insert an example", () => this.set("tools", JSON.stringify(EXAMPLE, null, 2))),
        h("label", { class: "inline" }, "Calls ", choice)),
      h("form", { onsubmit: (event) => event.preventDefault() }, field("API key", secret, "kept until the tab is closed")),
    );
    this.checkTools();
    hear("settings", (name) => {
      if (name === "tools") this.checkTools();
      this.describe();
    });
    hear("models", () => this.describe());
  }

  number(name, text, range, hint) {
    const input = h("input", { type: "number", ...range, value: settings[name], onchange: () => this.take(name, input) });
    this.fields[name] = input;
    return field(text, input, hint);
  }

  // A number out of its range stays what it was, and the browser says why.
  take(name, input) {
    if (input.value !== "" && input.reportValidity()) change(name, input.valueAsNumber);
    else input.value = settings[name];
  }

  area(name, text, rows, props = {}) {
    const area = h("textarea", { rows, value: settings[name], oninput: () => change(name, area.value), ...props });
    this.fields[name] = area;
    return field(text, area);
  }

  // From elsewhere: an imported file, the example.
  set(name, value) {
    this.fields[name].value = value;
    change(name, value);
  }

  checkTools() {
    let bad = false;
    try {
      const tools = readTools(settings.tools);
      this.check.textContent = tools.length ? `Tools: ${tools.map((tool) => tool.function.name).join(", ")}. Calls are shown, never run.` : "No tools.";
    } catch (error) {
      bad = true;
      this.check.textContent = error.message;
    }
    this.check.classList.toggle("bad", bad);
    this.fields.tools.setAttribute("aria-invalid", bad);
  }

  describe() {
    const model = named(settings.model);
    this.about.textContent = model
      ? `${model.id}: ${model.meta.kind}, ${(model.meta.parameters / 1e6).toFixed(2)} M parameters, context ${model.meta.context.toLocaleString("en")}, built by ${model.meta.stage}.`
      : "No generative model is being served.";
  }

  async unlock(value) {
    key.set(value.trim());
    await loadModels();
    say("API key accepted.");
  }
}

customElements.define("settings-panel", SettingsPanel);

export async function firstModels() {
  try {
    await loadModels();
  } catch (error) {
    if (error.status === 401) error.message = "This server requires an API key: Settings, last field.";
    complain(error);
  }
}

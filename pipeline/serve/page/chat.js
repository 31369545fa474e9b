// <chat-panel>: conversations with branches, streamed, stopped, edited, kept, exported and imported.

import { button, complain, find, guarded, h, number, say, sends } from "./dom.js";
import { answer, speed } from "./generate.js";
import { judge, prefer, rate, score } from "./judge.js";
import { Growing } from "./markdown.js";
import { hear, named, readTools, settings, tell } from "./state.js";
import * as store from "./store.js";
import { Conversation, exported, imported } from "./tree.js";
import { turnElement } from "./turn.js";

const CURRENT = "stagecoach-conversation";
const MOST_FILE = 20_000_000; // bytes of an imported file

class ChatPanel extends HTMLElement {
  async connectedCallback() {
    this.list = h("ul", { class: "conversations" });
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Conversation", tabindex: 0 });
    this.input = h("textarea", { id: "message", rows: 2, placeholder: "Send a message. Enter sends, Shift+Enter starts a new line.", "aria-label": "Message" });
    this.sendButton = button("Send", () => this.send(), { class: "primary" });
    this.stopButton = button("Stop", () => this.running?.abort(), { class: "primary", hidden: true });
    this.gauge = h("meter", { min: 0, max: 1, value: 0, "aria-label": "Context used" });
    this.gaugeText = h("span", {});
    this.file = h("input", { type: "file", accept: ".json,application/json", hidden: true, id: "import-file", "aria-label": "Conversation file", onchange: guarded(() => this.import()) });
    this.append(
      h("details", { class: "side", open: matchMedia("(min-width: 900px)").matches },
        h("summary", {}, "Conversations"),
        h("div", { class: "row" },
          button("New", () => this.open(new Conversation())),
          button("Import", () => this.file.click()), this.file,
          button("Export", guarded(() => this.export()))),
        this.list),
      h("div", { class: "column" }, this.log,
        h("form", { class: "composer", onsubmit: (event) => event.preventDefault() }, this.input,
          h("div", { class: "row" }, this.sendButton, this.stopButton,
            h("span", { class: "gauge" }, this.gauge, this.gaugeText)))));
    sends(this.input, () => this.send(), true);
    this.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    this.conversation = new Conversation();
    const held = await store.all();
    const current = held.find((one) => one.id === localStorage.getItem(CURRENT));
    this.open(current ? new Conversation(current) : new Conversation());
    hear("models", () => this.draw());
    hear("settings", (name) => ["model", "system"].includes(name) && this.measure());
  }

  open(conversation) {
    this.running?.abort();
    this.conversation = conversation;
    localStorage.setItem(CURRENT, conversation.id);
    this.draw();
    this.log.scrollTop = this.log.scrollHeight;
    this.drawList();
  }

  async keep(conversation) {
    await store.put(conversation.data());
    this.drawList();
  }

  // Read newly, so that the list holds what the database does.
  async drawList() {
    const rows = (await store.all()).map((data) => {
      const title = data.title || "Untitled";
      return h("li", { class: data.id === this.conversation.id ? "current" : "" },
        button(title, () => this.open(new Conversation(data)), { class: "link", "aria-current": data.id === this.conversation.id ? "true" : false }),
        button("×", guarded(() => this.remove(data.id)), { class: "icon", "aria-label": `Delete ${title}` }));
    });
    this.list.replaceChildren(...rows);
  }

  async remove(id) {
    await store.remove(id);
    if (id === this.conversation.id) this.open(new Conversation());
    else this.drawList();
  }

  draw() {
    const path = this.conversation.path();
    this.log.replaceChildren(...path.map((turn, place) => turnElement(turn, this.conversation.siblings(turn), place === path.length - 1, this)));
    if (!path.length) {
      this.log.append(h("div", { class: "empty" }, h("h2", {}, "Chat with your model"),
        h("p", {}, "Stop an answer, edit it into a branch, inspect it token by token, or compare it with another checkpoint's.")));
    }
    this.measure();
    tell("conversation");
  }

  measure() {
    const last = this.conversation.path().findLast((turn) => turn.meta.numPrompt !== undefined);
    const context = named(settings.model)?.meta.context ?? 0;
    const used = last ? last.meta.numPrompt + last.meta.numNew : 0;
    Object.assign(this.gauge, { max: context || 1, high: 0.9 * context, value: used });
    this.gaugeText.textContent = context ? `${number(used)} of ${number(context)} tokens of context` : "";
  }

  // -- what the buttons do -------------------------------------------------------------------------------------------

  send() {
    const content = this.input.value;
    if (!content.trim() || this.running) return;
    this.input.value = "";
    this.answer(this.conversation.add(this.conversation.path().at(-1), { role: "user", content }));
  }

  go(turn) {
    if (this.running) return;
    this.conversation.choose(turn);
    this.keep(this.conversation);
    this.draw();
    this.log.querySelector(`[data-turn="${turn.id}"] .branches button:not([disabled])`)?.focus();
  }

  edit(turn, content) {
    if (this.running) return;
    const added = this.conversation.add(this.conversation.parent(turn), { ...turn.message, content });
    if (turn.message.role === "assistant") {
      this.keep(this.conversation);
      return this.draw();
    }
    let last = added; // results of the same turn's other calls come along
    for (const next of this.following(turn)) last = this.conversation.add(last, next.message);
    this.answer(last);
  }

  *following(turn) {
    const held = this.conversation;
    for (let id = held.chosen.get(turn.id); held.turns.get(id)?.message.role === "tool"; id = held.chosen.get(id)) yield held.turns.get(id);
  }

  regenerate(turn) {
    if (settings.temperature === 0) say("At temperature 0 every answer is the same.");
    this.answer(this.conversation.parent(turn));
  }

  results(turn, results) {
    if (this.running) return;
    let last = turn;
    for (const { id, name, content } of results) last = this.conversation.add(last, { role: "tool", tool_call_id: id, name, content });
    this.answer(last);
  }

  tokens(turn) {
    tell("tokens", { model: turn.meta.model, prompt: turn.meta.prompt, tokens: turn.meta.tokens, text: turn.message.content });
    find("tab-tokens").click();
  }

  async prefer(turn, siblings) {
    const prompt = this.conversation.messages(this.conversation.parent(turn), settings.system);
    for (const other of siblings) {
      if (JSON.stringify(other.message) !== JSON.stringify(turn.message)) await prefer(turn.meta.model, prompt, turn.message, other.message, readTools(settings.tools));
    }
  }

  async rate(turn, desirable) {
    const { conversation } = this;
    const prompt = conversation.messages(conversation.parent(turn), settings.system);
    await rate(turn.meta.model, prompt, turn.message, desirable, readTools(settings.tools));
    turn.meta.desirable = desirable;
    await this.keep(conversation);
    if (this.conversation !== conversation || this.running) return;
    this.draw();
    this.log.querySelector(`[data-turn="${turn.id}"] .verdict [aria-pressed="true"]`)?.focus();
  }

  // -- answering -----------------------------------------------------------------------------------------------------

  // Ask for an answer to a turn; the first one has the seed of the settings, each further branch the next seed.
  async answer(turn) {
    if (this.running) return;
    const { conversation } = this;
    const running = (this.running = new AbortController());
    let reply = null;
    try {
      const tools = readTools(settings.tools);
      const messages = conversation.messages(turn, settings.system);
      const seed = settings.seed + [...conversation.turns.values()].filter((other) => other.parent === turn.id).length;
      reply = conversation.add(turn, { role: "assistant", content: "" }, { model: settings.model, seed, temperature: settings.temperature });
      this.draw();
      this.busy(true);
      const growing = new Growing(this.log.querySelector(`[data-turn="${reply.id}"] .text`));
      const request = { messages, seed, ...(tools.length > 0 && { tools, tool_choice: settings.tool_choice }) };
      const result = await answer(request, running.signal, (now) => {
        reply.message.content = now.text;
        growing.grow(now.text);
        this.follow();
        if (now.first !== null) this.gaugeText.textContent = `${number(now.tokens.length)} tokens, ${number(speed(now))} tok/s`;
      });
      this.finish(reply, result);
      await growing.end(reply.message.content);
      if (judge() && result.finish !== "stopped") reply.meta.reward = await score([...messages, reply.message], tools);
    } catch (error) {
      if (reply) Object.assign(reply.meta, { finish: "error", error: error.message });
      complain(error);
    } finally {
      if (this.running === running) this.running = null;
      this.busy(false);
      await this.keep(conversation);
      if (this.conversation === conversation) this.settle();
    }
  }

  finish(reply, result) {
    const { message, meta } = reply;
    if (result.calls.length) message.tool_calls = result.calls;
    Object.assign(meta, {
      finish: result.finish, tokens: result.tokens, prompt: result.prompt, speed: speed(result),
      numPrompt: result.usage?.prompt_tokens ?? result.prompt.length, numNew: result.usage?.completion_tokens ?? result.tokens.length,
    });
  }

  settle() {
    const bottom = this.atBottom;
    this.draw();
    if (bottom) this.log.scrollTop = this.log.scrollHeight;
    const last = this.conversation.path().at(-1);
    if (last?.meta.numNew !== undefined) say(`Answer of ${last.meta.numNew} tokens.`);
  }

  get atBottom() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
  }

  follow() {
    if (this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 160) this.log.scrollTop = this.log.scrollHeight;
  }

  busy(is) {
    this.sendButton.hidden = is;
    this.stopButton.hidden = !is;
    this.log.setAttribute("aria-busy", is);
    if (is) this.log.scrollTop = this.log.scrollHeight;
  }

  // -- files ---------------------------------------------------------------------------------------------------------

  async export() {
    const text = JSON.stringify(exported(this.conversation, settings, readTools(settings.tools)), null, 1);
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    h("a", { href: address, download: "conversation.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  async import() {
    const [file] = this.file.files;
    if (!file) return;
    try {
      if (file.size > MOST_FILE) throw new Error(`at most ${MOST_FILE} bytes, found ${file.size}`);
      const data = JSON.parse(await file.text());
      const { conversation, system } = imported(data);
      const tools = Array.isArray(data.tools) && data.tools.length ? JSON.stringify(data.tools, null, 2) : "";
      find("settings").set("system", system);
      find("settings").set("tools", tools);
      await this.keep(conversation);
      this.open(conversation);
      say("Imported.");
    } catch (error) {
      throw new Error(`${file.name}: ${error.message}`);
    } finally {
      this.file.value = "";
    }
  }
}

customElements.define("chat-panel", ChatPanel);

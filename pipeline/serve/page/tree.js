// A conversation with branches: a tree of turns, and at each fork the branch that is shown.
//
//     turn = { id, parent, message, meta }      message as in OpenAI's API; meta: model, seed, counts, tokens, reward, desirable
//
// Editing a turn or answering anew adds a sibling; nothing is ever overwritten.

const ROOT = "root";
const ROLES = ["user", "assistant", "tool"];
const MOST_TURNS = 5000;

export const fresh = () => `c${Date.now().toString(36)}${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;

export class Conversation {
  constructor({ id = fresh(), title = "", updated = Date.now(), turns = [], chosen = [] } = {}) {
    this.id = id;
    this.title = title;
    this.updated = updated;
    this.turns = new Map(turns.map((turn) => [turn.id, turn]));
    this.chosen = new Map(chosen); // parent -> child
    this.last = turns.length;
  }

  // The turns that are shown, first to last.
  path() {
    const found = [];
    for (let id = this.chosen.get(ROOT); id !== undefined; id = this.chosen.get(id)) found.push(this.turns.get(id));
    return found;
  }

  siblings(turn) {
    return [...this.turns.values()].filter((other) => other.parent === turn.parent);
  }

  add(parent, message, meta = {}) {
    while (this.turns.has(`t${this.last}`)) this.last += 1;
    const turn = { id: `t${this.last}`, parent: parent?.id ?? ROOT, message, meta };
    this.turns.set(turn.id, turn);
    this.choose(turn);
    if (!this.title && message.role === "user") this.title = message.content.trim().split("\n")[0].slice(0, 60);
    return turn;
  }

  choose(turn) {
    this.chosen.set(turn.parent, turn.id);
    this.updated = Date.now();
  }

  parent(turn) {
    return this.turns.get(turn.parent) ?? null;
  }

  // The messages that lead to a turn, itself included, in OpenAI's form.
  messages(turn, system = "") {
    const found = [];
    for (let at = turn; at; at = this.parent(at)) found.unshift(at.message);
    return system.trim() ? [{ role: "system", content: system }, ...found] : found;
  }

  data() {
    const { id, title, updated } = this;
    return { id, title, updated, turns: [...this.turns.values()], chosen: [...this.chosen] };
  }
}

// For a file: the branch that is shown as `messages`, as data/dialogues has it, and all branches as `turns`; no token lists.
export function exported(conversation, settings, tools) {
  const { title, turns, chosen } = conversation.data();
  const path = conversation.path();
  const light = turns.map(({ meta: { tokens, prompt, ...meta }, ...turn }) => ({ ...turn, meta }));
  return { title, messages: path.length ? conversation.messages(path.at(-1), settings.system) : [], tools, turns: light, chosen };
}

const text = (value, where) => {
  if (typeof value !== "string") throw new Error(`${where}: expected a text`);
  return value;
};

// A message of a file, copied field by field: nothing else gets in.
function message(value, where) {
  if (!ROLES.includes(value?.role)) throw new Error(`${where}: expected a role of ${ROLES.join(", ")}`);
  const found = { role: value.role, content: text(value.content ?? "", `${where}.content`) };
  if (value.role === "tool") {
    found.tool_call_id = text(value.tool_call_id ?? "call", `${where}.tool_call_id`);
    found.name = text(value.name ?? "tool", `${where}.name`);
  }
  if (value.tool_calls != null && value.role === "assistant") {
    if (!Array.isArray(value.tool_calls)) throw new Error(`${where}.tool_calls: expected a list`);
    found.tool_calls = value.tool_calls.map((call, place) => {
      const at = `${where}.tool_calls.${place}`;
      const { name, arguments: given } = call?.function ?? {};
      const body = typeof given === "object" && given !== null ? JSON.stringify(given) : text(given, `${at}.arguments`);
      return { id: text(call.id ?? `call_${place}`, `${at}.id`), type: "function", function: { name: text(name, `${at}.name`), arguments: body } };
    });
    if (!found.tool_calls.length) delete found.tool_calls;
  }
  return found;
}

// Counts and names of a turn's meta; anything else is dropped.
function meta(value) {
  const kinds = { model: "string", finish: "string", error: "string", seed: "number", temperature: "number", speed: "number", numPrompt: "number", numNew: "number", reward: "number", desirable: "boolean" };
  return Object.fromEntries(Object.entries(kinds).filter(([name, kind]) => typeof value?.[name] === kind).map(([name]) => [name, value[name]]));
}

// A conversation of a file: what `exported` wrote, or {"messages": [...]} alone. Throws an Error that says what is wrong.
export function imported(file) {
  if (typeof file !== "object" || file === null || Array.isArray(file)) throw new Error("expected a JSON object with messages");
  const conversation = new Conversation({ title: typeof file.title === "string" ? file.title.slice(0, 60) : "" });
  const all = Array.isArray(file.messages) ? file.messages : [];
  const opens = ["system", "developer"].includes(all[0]?.role);
  const system = opens ? text(all[0].content ?? "", "messages.0.content") : "";
  if (!Array.isArray(file.turns)) {
    if (!all.length) throw new Error("expected messages, found none");
    let last = null;
    all.forEach((one, place) => {
      if (place >= Number(opens)) last = conversation.add(last, message(one, `messages.${place}`));
    });
    return { conversation, system };
  }
  if (file.turns.length > MOST_TURNS) throw new Error(`at most ${MOST_TURNS} turns, found ${file.turns.length}`);
  file.turns.forEach((turn, place) => {
    const where = `turns.${place}`;
    const id = text(turn?.id, `${where}.id`);
    const parent = text(turn.parent, `${where}.parent`);
    if (id === ROOT || conversation.turns.has(id)) throw new Error(`${where}: the id ${id} appears twice`);
    if (parent !== ROOT && !conversation.turns.has(parent)) throw new Error(`${where}: its parent ${parent} does not come before it`);
    conversation.turns.set(id, { id, parent, message: message(turn.message, `${where}.message`), meta: meta(turn.meta) });
    conversation.chosen.set(parent, id);
  });
  for (const pair of Array.isArray(file.chosen) ? file.chosen : []) {
    if (Array.isArray(pair) && conversation.turns.get(pair[1])?.parent === pair[0]) conversation.chosen.set(pair[0], pair[1]);
  }
  return { conversation, system };
}

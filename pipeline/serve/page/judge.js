// What answers are worth: a reward model's score where one is served, and people's choices, which train the next model.

import { call } from "./api.js";
import { number, say } from "./dom.js";
import { named, ofKind } from "./state.js";

export const judge = () => ofKind("reward")[0]?.id;
export const collects = (model) => named(model)?.meta.feedback === true;

// The reward of the last message. Comparable only between answers to one prompt.
export async function score(messages, tools) {
  const found = await call("/score", { model: judge(), conversations: [{ messages, tools }] });
  return found.data[0].reward;
}

export const rewardText = (reward) => `reward ${number(reward, 2)}`;

// Post that one answer is better than another. `stage_tasks` adds the pairs to data/preferences.
export async function prefer(model, prompt, chosen, rejected, tools) {
  const found = await call("/preferences", { model, prompt, chosen: [chosen], rejected: [rejected], tools, kind: "page" });
  say(found.stored ? `Stored: ${found.count} ${found.count === 1 ? "choice" : "choices"}. The next dvc repro learns from them.` : "This choice was stored before.");
  return found;
}

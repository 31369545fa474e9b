// What answers are worth: a reward model's score where one is served, and people's verdicts, which train the next model.

import { call } from "./api.js";
import { number, say } from "./dom.js";
import { named, ofKind } from "./state.js";

export const judge = () => ofKind("reward")[0]?.id;
export const collects = (model) => named(model)?.meta.feedback === true;

// The reward of the last message, comparable only between answers to one prompt; nothing where the judge cannot read so much.
export async function score(messages, tools) {
  try {
    return (await call("/score", { model: judge(), conversations: [{ messages, tools }] })).data[0].reward;
  } catch (error) {
    if (error.code !== "context_length_exceeded") throw error;
    return undefined;
  }
}

export const rewardText = (reward) => `reward ${number(reward, 2)}`;

// Post that one answer is better than another. `stage_tasks` adds the pairs to data/preferences.
export async function prefer(model, prompt, chosen, rejected, tools) {
  return stored(await call("/preferences", { model, prompt, chosen: [chosen], rejected: [rejected], tools, kind: "page" }), "choice");
}

// Post that an answer is good or bad. `stage_tasks` adds the labels to data/labels.
export async function rate(model, prompt, answer, desirable, tools) {
  return stored(await call("/labels", { model, prompt, answer: [answer], desirable, tools }), "verdict");
}

function stored(found, name) {
  say(found.stored ? `Stored: ${found.count} ${found.count === 1 ? name : `${name}s`}. The next dvc repro learns from them.` : `This ${name} was stored before.`);
  return found;
}

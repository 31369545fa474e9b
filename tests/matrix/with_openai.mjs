// The 49 rows through openai's JavaScript client; tests/test_clients*.py are the same rows in Python, with names.

import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import {
  ASK, BAD_RULES, BASE, NESTED_RULES, PATIENCE, QUESTION, UNIQUE_RULES, WEATHER_RULES, facts, fallsIdle, isBooking, isCall, isScored,
  isScoredAsSaid, isWeather, near, refused, run, speak, tokens,
} from './asked.mjs';

const client = new OpenAI({ baseURL: BASE, apiKey: facts.key, maxRetries: 0 });
const WEATHER = { type: 'function', function: { name: 'get_weather', description: 'The weather in a city', parameters: WEATHER_RULES } };
const TIME = { type: 'function', function: { name: 'get_time', parameters: { type: 'object', properties: {} } } };
const TOOL_CALL = String(facts.control.tool_call);

const chat = (asked = {}, by = client, options = {}) =>
  by.chat.completions.create({ model: 'nano', messages: ASK, max_tokens: 12, seed: 5, ...asked }, options);
const said = async (asked) => (await chat(asked)).choices[0].message.content;
const chunksOf = async (asked) => Array.fromAsync(await chat({ ...asked, stream: true }));
const joined = (chunks) => chunks.map((chunk) => chunk.choices[0].delta.content ?? '').join('');
const complete = (asked = {}) => client.completions.create({ model: 'nano', prompt: 'The pilot asked', max_tokens: 8, seed: 3, ...asked });
const parsed = (call) => JSON.parse(call.function.arguments);
const shaped = (schema) => ({ type: 'json_schema', json_schema: { name: 'x', schema, strict: true } });

async function opened(asked) {
  const stream = await chat({ ...asked, stream: true, ignore_eos: true });
  await stream[Symbol.asyncIterator]().next();
  return stream;
}
const close = (streams) => streams.forEach((stream) => stream.controller.abort());

const rows = {
  1: async () => assert.deepEqual((await Array.fromAsync(client.models.list())).map((model) => model.id), ['nano', 'other', 'judge']),
  2: async () => {
    const model = await client.models.retrieve('nano');
    assert.deepEqual([model.id, model.object, model.meta.kind, model.meta.context], ['nano', 'model', 'causal', 2048]);
  },
  3: async () => {
    const error = await refused(client.models.retrieve('gpt-4o'));
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, 'model_not_found');
    assert.match(error.message, /nano/);
  },
  4: async () => {
    const answer = await chat();
    const [choice] = answer.choices;
    assert.equal(answer.object, 'chat.completion');
    assert.match(answer.id, /^chatcmpl-/);
    assert.match(answer.system_fingerprint, /^fp_/);
    assert.deepEqual([choice.index, choice.message.role], [0, 'assistant']);
    assert.ok(choice.message.content && ['stop', 'length'].includes(choice.finish_reason));
    const { total_tokens, prompt_tokens, completion_tokens } = answer.usage;
    assert.ok(total_tokens === prompt_tokens + completion_tokens && completion_tokens > 0 && completion_tokens <= 12);
  },
  5: async () => {
    const told = [];
    for (const role of ['system', 'developer']) told.push(await chat({ messages: [{ role, content: 'Be short.' }, ...ASK] }));
    assert.equal(told[0].choices[0].message.content, told[1].choices[0].message.content);
    assert.equal(told[0].usage.prompt_tokens, told[1].usage.prompt_tokens);
    assert.ok(told[0].usage.prompt_tokens > (await chat()).usage.prompt_tokens);
  },
  6: async () => {
    const chunks = await chunksOf();
    assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
    assert.ok(chunks.every((chunk) => chunk.object === 'chat.completion.chunk' && chunk.usage == null));
    assert.deepEqual(chunks[0].choices[0].delta, { role: 'assistant', content: '' });
    const last = chunks.at(-1).choices[0];
    assert.ok(chunks.slice(0, -1).every((chunk) => chunk.choices[0].finish_reason === null));
    assert.ok(['stop', 'length'].includes(last.finish_reason));
    assert.deepEqual(last.delta, {});
    assert.equal(joined(chunks), await said());
  },
  7: async () => {
    const chunks = await chunksOf({ stream_options: { include_usage: true } });
    const { usage } = await chat();
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.deepEqual({ ...chunks.at(-1).usage, prompt_tokens_details: null }, { ...usage, prompt_tokens_details: null });
  },
  8: async () => {
    const whole = (await chat({ n: 3 })).choices.map((choice) => choice.message.content);
    assert.equal(new Set(whole).size, 3);
    const pieces = ['', '', ''];
    for (const { choices: [choice] } of await chunksOf({ n: 3 })) pieces[choice.index] += choice.delta.content ?? '';
    assert.deepEqual(pieces, whole);
  },
  9: async () => {
    assert.equal(await said(), await said());
    const seeded = new Set(), free = new Set();
    for (let seed = 0; seed < 4; seed++) seeded.add(await said({ seed }));
    for (let time = 0; time < 3; time++) free.add(await said({ seed: null }));
    assert.deepEqual([seeded.size, free.size], [4, 3]);
  },
  10: async () => {
    const alone = await said({ max_tokens: 40 });
    const neighbors = [];
    for (let n = 0; n < 7; n++) neighbors.push(await opened({ seed: 100 + n, max_tokens: 1900 }));
    await speak(7);
    assert.equal(await said({ max_tokens: 40 }), alone);
    close(neighbors);
    await fallsIdle();
  },
  11: async () => {
    const answers = [];
    for (const seed of [1, 2]) answers.push((await chat({ temperature: 0, seed, logprobs: true, top_logprobs: 1 })).choices[0]);
    assert.equal(answers[0].message.content, answers[1].message.content);
    for (const entry of answers[0].logprobs.content) assert.equal(entry.logprob, entry.top_logprobs[0].logprob);
  },
  12: async () => {
    const text = await said({ max_tokens: 60, ignore_eos: true });
    const stop = text.slice(20, 22);
    const [choice] = (await chat({ max_tokens: 60, stop, ignore_eos: true })).choices;
    assert.deepEqual([choice.message.content, choice.finish_reason], [text.slice(0, text.indexOf(stop)), 'stop']);
  },
  13: async () => {
    const text = await said({ max_tokens: 60, ignore_eos: true });
    const stop = text.slice(10, 25);
    const chunks = await chunksOf({ max_tokens: 60, stop: ['never said', stop], ignore_eos: true });
    assert.equal(joined(chunks), text.slice(0, text.indexOf(stop)));
  },
  14: async () => {
    for (const budget of [{ max_tokens: 3 }, { max_completion_tokens: 3, max_tokens: 50 }]) {
      const answer = await chat({ ...budget, ignore_eos: true });
      assert.deepEqual([answer.choices[0].finish_reason, answer.usage.completion_tokens], ['length', 3]);
    }
  },
  15: async () => {
    const { message, logprobs } = (await chat({ logprobs: true })).choices[0];
    assert.equal(Buffer.from(logprobs.content.flatMap((entry) => entry.bytes)).toString('utf8'), message.content);
    assert.ok(logprobs.content.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 0));
    const streamed = (await chunksOf({ logprobs: true })).flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []);
    near(streamed.map((entry) => entry.logprob), logprobs.content.map((entry) => entry.logprob));
  },
  16: async () => {
    for (const entry of (await chat({ logprobs: true, top_logprobs: 20 })).choices[0].logprobs.content) {
      const values = entry.top_logprobs.map((top) => top.logprob);
      assert.equal(values.length, 20);
      assert.deepEqual(values, values.toSorted((a, b) => b - a));
    }
  },
  17: async () => {
    const [z] = await tokens('z');
    assert.equal(await said({ logit_bias: { [z]: 100 }, max_tokens: 5 }), 'zzzzz');
    const text = await said({ temperature: 0, max_tokens: 1 });
    const [first] = await tokens(text);
    assert.notEqual(await said({ temperature: 0, max_tokens: 1, logit_bias: { [first]: -100 } }), text);
  },
  18: async () => {
    const prompt = await tokens('🚂🌊');
    assert.ok(prompt.length > 4, 'its bytes are tokens');
    assert.equal((await complete({ prompt, echo: true, max_tokens: 0 })).choices[0].text, '🚂🌊');
    for (let seed = 0; seed < 8; seed++) {
      assert.equal(joined(await chunksOf({ seed, max_tokens: 40 })), await said({ seed, max_tokens: 40 }));
    }
  },
  19: async () => {
    const content = ['Which way would ', 'the ferry go?'].map((text) => ({ type: 'text', text }));
    assert.equal(content.map((part) => part.text).join(''), QUESTION);
    assert.deepEqual((await chat({ messages: [{ role: 'user', content }] })).choices[0].message, (await chat()).choices[0].message);
  },
  20: async () => {
    const call = { id: 'call_1', type: 'function', function: { name: 'get_time', arguments: '{}' } };
    const result = { role: 'tool', tool_call_id: 'call_1', content: 'noon' };
    assert.ok(await said({ messages: [...ASK, { role: 'assistant', content: null, tool_calls: [call] }, result], tools: [TIME], tool_choice: 'none' }));
  },
  21: async () => {
    const messages = [{ role: 'user', content: 'A prompt that nobody but openai JS has asked, long enough to be kept: 1 2 3 4 5.' }];
    const first = (await chat({ messages })).usage, second = (await chat({ messages })).usage;
    assert.ok(first.prompt_tokens_details.cached_tokens < 20);
    assert.equal(second.prompt_tokens_details.cached_tokens, second.prompt_tokens - 1);
  },
  22: async () => {
    const stream = await opened({ max_tokens: 1900 });
    await speak(1);
    close([stream]);
    await fallsIdle();
  },
  23: async () => {
    let called = 0;
    for (let seed = 0; seed < 6; seed++) {
      const asked = { tools: [WEATHER, TIME], tool_choice: 'auto', seed, max_tokens: 120, logit_bias: { [TOOL_CALL]: 2 * seed } };
      const { message, finish_reason } = (await chat(asked)).choices[0];
      for (const call of message.tool_calls ?? []) isCall(call.function.name, parsed(call));
      called += Boolean(message.tool_calls);
      assert.equal(finish_reason === 'tool_calls', Boolean(message.tool_calls));
    }
    assert.ok(called > 0 && called < 6, 'some of these seeds call, some talk');
  },
  24: async () => {
    const parameters = { type: 'object', properties: { n: { type: 'integer' } }, required: ['n'] };
    const tools = [{ type: 'function', function: { name: 'f', parameters } }];
    for (let seed = 0; seed < 10; seed++) {
      const { choices: [choice], usage } = await chat({ tools, tool_choice: 'required', seed, max_tokens: 64 });
      assert.deepEqual([choice.finish_reason, choice.message.content], ['tool_calls', null]);
      assert.ok(usage.completion_tokens <= 64 && choice.message.tool_calls.every((call) => Number.isInteger(parsed(call).n)));
    }
  },
  25: async () => {
    for (const name of ['get_weather', 'get_time']) {
      const asked = { tools: [WEATHER, TIME], tool_choice: { type: 'function', function: { name } }, max_tokens: 120 };
      const calls = (await chat(asked)).choices[0].message.tool_calls;
      assert.deepEqual(calls.map((call) => call.function.name), [name]);
      isCall(name, parsed(calls[0]));
    }
  },
  26: async () => {
    const { message } = (await chat({ tools: [WEATHER], tool_choice: 'none', logit_bias: { [TOOL_CALL]: 100 } })).choices[0];
    assert.equal(message.tool_calls, undefined);
    assert.doesNotMatch(message.content, /<tool_call>/);
  },
  27: async () => {
    const [newline] = await tokens('\n');
    const asked = { tools: [TIME], tool_choice: 'required', max_tokens: 300, logit_bias: { [newline]: 100 } };
    const calls = async (more) => (await chat({ ...asked, ...more })).choices[0].message.tool_calls.length;
    assert.ok((await calls({})) > 1);
    assert.equal(await calls({ parallel_tool_calls: false }), 1);
  },
  28: async () => {
    const asked = { tools: [WEATHER, TIME], tool_choice: 'required', max_tokens: 200 };
    const whole = (await chat(asked)).choices[0].message.tool_calls;
    const chunks = await chunksOf(asked), calls = [];
    for (const piece of chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? [])) {
      const first = !(piece.index in calls);
      if (first) calls[piece.index] = { name: piece.function.name, arguments: '' };
      assert.ok(first ? piece.id.startsWith('call_') && piece.type === 'function' : piece.id == null && piece.function.name == null);
      calls[piece.index].arguments += piece.function.arguments;
    }
    assert.equal(chunks.at(-1).choices[0].finish_reason, 'tool_calls');
    assert.deepEqual(calls, whole.map((call) => ({ name: call.function.name, arguments: call.function.arguments })));
  },
  29: async () => {
    const tools = [{ type: 'function', function: { name: 'book', parameters: NESTED_RULES } }];
    for (let seed = 0; seed < 5; seed++) {
      const answer = await chat({ tools, tool_choice: 'required', seed, max_tokens: 200, parallel_tool_calls: false });
      isBooking(parsed(answer.choices[0].message.tool_calls[0]));
    }
  },
  30: async () => {
    const asked = { tools: [TIME], tool_choice: 'required' };
    const error = await refused(chat({ ...asked, max_tokens: 8 }));
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, 'budget_too_small');
    const needed = Number(/ takes (\d+)/.exec(error.message)[1]);
    assert.equal((await chat({ ...asked, max_tokens: needed })).choices[0].finish_reason, 'tool_calls');
    assert.equal((await refused(chat({ ...asked, max_tokens: needed - 1 }))).status, 400);
  },
  31: async () => {
    const call = (await chat({ tools: [TIME], tool_choice: 'required', max_tokens: 100, parallel_tool_calls: false })).choices[0].message;
    const told = async (content) => {
      const messages = [...ASK, call, { role: 'tool', tool_call_id: call.tool_calls[0].id, content }];
      return (await chat({ messages, tools: [TIME], temperature: 0, tool_choice: 'none' })).usage.prompt_tokens;
    };
    assert.ok((await told('midnight in the harbour')) > (await told('noon')));
  },
  32: async () => {
    for (let seed = 0; seed < 5; seed++) {
      const found = JSON.parse(await said({ response_format: { type: 'json_object' }, seed, max_tokens: 40 }));
      assert.ok(found !== null && typeof found === 'object' && !Array.isArray(found));
    }
  },
  33: async () => {
    for (let seed = 0; seed < 5; seed++) isWeather(JSON.parse(await said({ response_format: shaped(WEATHER_RULES), seed, max_tokens: 60 })));
  },
  34: async () => {
    const Plan = z.object({ steps: z.array(z.object({ kind: z.enum(['go', 'stop']), metres: z.int() })), note: z.string().nullable() });
    const asked = { model: 'nano', messages: ASK, response_format: zodResponseFormat(Plan, 'plan'), max_tokens: 80, seed: 1 };
    const { message } = (await client.chat.completions.parse(asked)).choices[0];
    assert.deepEqual(Plan.parse(JSON.parse(message.content)), message.parsed);
  },
  35: async () => {
    const error = await refused(chat({ response_format: shaped(UNIQUE_RULES) }));
    assert.equal(error.status, 400);
    assert.match(error.message, /uniqueItems/);
  },
  36: async () => {
    const answer = await complete();
    assert.equal(answer.object, 'text_completion');
    assert.ok(answer.choices[0].text && answer.usage.prompt_tokens > 0);
  },
  37: async () => {
    const prompt = ['The pilot asked', 'def add('], single = [];
    const answer = await complete({ prompt, temperature: 0, n: 2 });
    for (const one of prompt) single.push((await complete({ prompt: one, temperature: 0 })).choices[0].text);
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
    assert.deepEqual(answer.choices.map((choice) => choice.text), [single[0], single[0], single[1], single[1]]);
  },
  38: async () => {
    const prompt = await tokens('The pilot asked');
    assert.equal((await complete({ prompt })).choices[0].text, (await complete()).choices[0].text);
  },
  39: async () => {
    const prompt = [await tokens('The pilot asked'), await tokens('def add(')], single = [];
    for (const ids of prompt) single.push((await complete({ prompt: ids, temperature: 0 })).choices[0].text);
    assert.deepEqual((await complete({ prompt, temperature: 0 })).choices.map((choice) => choice.text), single);
  },
  40: async () => {
    const { fim_prefix, fim_suffix, fim_middle } = facts.control;
    const ids = [fim_prefix, ...(await tokens('def add(a, b):\n')), fim_suffix, ...(await tokens('\nadd(1, 2)')), fim_middle];
    const answer = await complete({ prompt: 'def add(a, b):\n', suffix: '\nadd(1, 2)' });
    assert.equal(answer.choices[0].text, (await complete({ prompt: ids })).choices[0].text);
    assert.equal(answer.usage.prompt_tokens, ids.length);
  },
  41: async () => {
    isScored((await complete({ echo: true, logprobs: 2, max_tokens: 0 })).choices[0], 'The pilot asked', 2);
    await isScoredAsSaid(
      async (seed) => (await complete({ seed, logprobs: 0, max_tokens: 1 })).choices[0],
      async (prompt) => (await complete({ prompt, echo: true, logprobs: 0, max_tokens: 0 })).choices[0],
    );
  },
  42: async () => {
    const chunks = await Array.fromAsync(await complete({ stream: true, echo: true, stream_options: { include_usage: true } }));
    const text = chunks.slice(0, -1).map((chunk) => chunk.choices[0].text).join('');
    assert.equal(text, 'The pilot asked' + (await complete()).choices[0].text);
    assert.ok(['stop', 'length'].includes(chunks.at(-2).choices[0].finish_reason) && chunks.at(-1).usage.completion_tokens > 0);
  },
  43: async () => {
    const error = await refused(chat({ model: 'gpt-4o' }));
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.match(error.message, /served: nano, other, judge/);
  },
  44: async () => {
    const error = await refused(chat({ messages: [] }));
    assert.deepEqual([error.status, error.param], [400, 'messages']);
  },
  45: async () => {
    const error = await refused(chat({ temperature: -1 }));
    assert.deepEqual([error.status, error.param], [400, 'temperature']);
  },
  46: async () => {
    const error = await refused(chat({ messages: [{ role: 'user', content: 'ab '.repeat(3000) }] }));
    assert.deepEqual([error.status, error.code], [400, 'context_length_exceeded']);
    assert.match(error.message, /2048/);
    assert.ok(await said());
  },
  47: async () => {
    for (const rules of BAD_RULES) assert.equal((await refused(chat({ response_format: shaped(rules) }))).status, 400);
  },
  48: async () => {
    for (const apiKey of ['wrong', `${facts.key}-not`, facts.key.toUpperCase()]) {
      const error = await refused(chat({}, new OpenAI({ baseURL: BASE, apiKey, maxRetries: 0 })));
      assert.ok(error instanceof OpenAI.AuthenticationError);
    }
    assert.ok(await said());
  },
  49: async () => {
    const busy = [];
    for (let seed = 0; seed < 40; seed++) busy.push(await opened({ max_tokens: 1900, seed }));
    try {
      const error = await refused(chat());
      assert.ok(error instanceof OpenAI.RateLimitError);
      assert.ok(Number(error.headers.get('retry-after')) >= 1 && error.code === 'queue_full');
      setTimeout(() => close(busy), 300);
      assert.ok((await chat({}, client, { maxRetries: PATIENCE })).choices[0].message.content);
    } finally {
      close(busy);
    }
    await fallsIdle();
  },
};

await run(rows, {});

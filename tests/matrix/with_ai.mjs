// The 49 rows through Vercel's ai SDK with its provider for OpenAI-compatible servers.
//
// Fields unknown to the SDK are passed in `providerOptions`; fields that it does not return are read from the response body, which it keeps on request.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from 'ai';
import assert from 'node:assert/strict';
import { z } from 'zod';
import {
  ASK, BAD_RULES, BASE, NESTED_RULES, PATIENCE, QUESTION, UNIQUE_RULES, WEATHER_RULES, facts, fallsIdle, isBooking, isCall, isScored,
  isWeather, near, post, refused, run, speak, tokens,
} from './asked.mjs';

globalThis.AI_SDK_LOG_WARNINGS = false;

const provider = (options) =>
  createOpenAICompatible({ name: 'stagecoach', baseURL: BASE, apiKey: facts.key, supportsStructuredOutputs: true, ...options });
const plain = provider({}), counting = provider({ includeUsage: true });
const TIME = tool({ inputSchema: jsonSchema({ type: 'object', properties: {} }) });
const TOOLS = { get_weather: tool({ description: 'The weather in a city', inputSchema: jsonSchema(WEATHER_RULES) }), get_time: TIME };
const TOOL_CALL = String(facts.control.tool_call);
const PROMPT = 'user:\nThe pilot asked\n\nassistant:\n'; // how the SDK formats a text to complete

const extra = (fields) => ({ providerOptions: { stagecoach: fields } });
const BASICS = { model: plain.chatModel('nano'), messages: ASK, maxOutputTokens: 12, seed: 5, maxRetries: 0 };
const chat = (asked) => generateText({ ...BASICS, include: { responseBody: true, requestBody: true }, ...asked });
const said = async (asked) => (await chat(asked)).text;
const sent = (answer) => JSON.parse(answer.finalStep.request.body);
const bodyOf = async (asked) => (await chat(asked)).finalStep.response.body;
const stream = (asked) => streamText({ ...BASICS, include: { rawChunks: true }, onError() {}, ...asked });
const partsOf = (asked) => Array.fromAsync(stream(asked).stream);
const rawOf = (parts) => parts.filter((part) => part.type === 'raw').map((part) => part.rawValue);
const textOf = (parts) => parts.filter((part) => part.type === 'text-delta').map((part) => part.text).join('');
const COMPLETION = { model: plain.completionModel('nano'), messages: undefined, prompt: 'The pilot asked', maxOutputTokens: 8, seed: 3 };
const complete = (asked) => chat({ ...COMPLETION, ...asked });

async function opened(asked) {
  const abort = new AbortController();
  const parts = stream({ ...extra({ ignore_eos: true }), ...asked, abortSignal: abort.signal }).stream[Symbol.asyncIterator]();
  for (;;) {
    const { value, done } = await parts.next();
    assert.ok(!done && value.type !== 'error', `no stream: ${value?.error}`);
    if (value.type === 'raw') return abort;
  }
}
const close = (aborts) => aborts.forEach((abort) => abort.abort());

async function fault(asked) {
  const error = await refused(chat(asked));
  assert.ok(APICallError.isInstance(error), String(error));
  return error;
}

const rows = {
  4: async () => {
    const answer = await chat();
    const { usage, finalStep: { response } } = answer;
    assert.match(response.id, /^chatcmpl-/);
    assert.match(response.body.system_fingerprint, /^fp_/);
    assert.deepEqual([response.body.object, response.modelId], ['chat.completion', 'nano']);
    assert.ok(answer.text && ['stop', 'length'].includes(answer.finishReason));
    assert.ok(usage.totalTokens === usage.inputTokens + usage.outputTokens && usage.outputTokens > 0 && usage.outputTokens <= 12);
  },
  5: async () => {
    const told = [await chat({ instructions: 'Be short.' })];
    const developer = { role: 'system', content: 'Be short.', providerOptions: { openaiCompatible: { role: 'developer' } } };
    told.push(await chat({ messages: [developer, ...ASK], allowSystemInMessages: true }));
    assert.equal(sent(told[1]).messages[0].role, 'developer');
    assert.equal(told[0].text, told[1].text);
    assert.equal(told[0].usage.inputTokens, told[1].usage.inputTokens);
    assert.ok(told[0].usage.inputTokens > (await chat()).usage.inputTokens);
    return 'the role is set in the `providerOptions` of a system message';
  },
  6: async () => {
    const parts = await partsOf(), chunks = rawOf(parts);
    assert.deepEqual(chunks[0].choices[0].delta, { role: 'assistant', content: '' });
    assert.deepEqual(chunks.at(-1).choices[0].delta, {});
    assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
    const kinds = parts.map((part) => part.type).filter((type) => type !== 'raw');
    assert.deepEqual(kinds.filter((type, index) => type !== kinds[index - 1]),
      ['start', 'start-step', 'text-start', 'text-delta', 'text-end', 'finish-step', 'finish']);
    assert.ok(['stop', 'length'].includes(parts.at(-1).finishReason));
    assert.equal(parts.at(-1).totalUsage.outputTokens, undefined, 'counts come only if asked for');
    assert.equal(textOf(parts), await said());
  },
  7: async () => {
    const parts = await partsOf({ model: counting.chatModel('nano') });
    const { usage } = await chat();
    assert.deepEqual(rawOf(parts).at(-1).choices, []);
    const counts = ({ inputTokens, outputTokens, totalTokens }) => [inputTokens, outputTokens, totalTokens];
    assert.deepEqual(counts(parts.at(-1).totalUsage), counts(usage));
  },
  8: async () => {
    const whole = (await bodyOf(extra({ n: 3 }))).choices.map((choice) => choice.message.content);
    assert.equal(new Set(whole).size, 3);
    const pieces = ['', '', ''];
    for (const { choices: [choice] } of rawOf(await partsOf(extra({ n: 3 })))) pieces[choice.index] += choice.delta.content ?? '';
    assert.deepEqual(pieces, whole);
    return 'the SDK returns one answer; all three are in the response body and raw chunks';
  },
  9: async () => {
    assert.equal(await said(), await said());
    const seeded = new Set(), free = new Set();
    for (let seed = 0; seed < 4; seed++) seeded.add(await said({ seed }));
    for (let time = 0; time < 3; time++) free.add(await said({ seed: undefined }));
    assert.deepEqual([seeded.size, free.size], [4, 3]);
  },
  10: async () => {
    const alone = await said({ maxOutputTokens: 40 });
    const neighbors = [];
    for (let n = 0; n < 7; n++) neighbors.push(await opened({ seed: 100 + n, maxOutputTokens: 1900 }));
    await speak(7);
    assert.equal(await said({ maxOutputTokens: 40 }), alone);
    close(neighbors);
    await fallsIdle();
  },
  11: async () => {
    const answers = [];
    for (const seed of [1, 2]) answers.push(await chat({ temperature: 0, seed, ...extra({ logprobs: true, top_logprobs: 1 }) }));
    assert.equal(answers[0].text, answers[1].text);
    const { content } = answers[0].finalStep.response.body.choices[0].logprobs;
    for (const entry of content) assert.equal(entry.logprob, entry.top_logprobs[0].logprob);
  },
  12: async () => {
    const asked = { maxOutputTokens: 60, ...extra({ ignore_eos: true }) };
    const text = await said(asked), stop = text.slice(20, 22);
    const answer = await chat({ ...asked, stopSequences: [stop] });
    assert.deepEqual([answer.text, answer.finishReason], [text.slice(0, text.indexOf(stop)), 'stop']);
  },
  13: async () => {
    const asked = { maxOutputTokens: 60, ...extra({ ignore_eos: true }) };
    const text = await said(asked), stop = text.slice(10, 25);
    assert.equal(textOf(await partsOf({ ...asked, stopSequences: ['never said', stop] })), text.slice(0, text.indexOf(stop)));
  },
  14: async () => {
    for (const asked of [{ maxOutputTokens: 3, ...extra({ ignore_eos: true }) }, extra({ max_completion_tokens: 3, ignore_eos: true })]) {
      const answer = await chat(asked);
      assert.deepEqual([answer.finishReason, answer.usage.outputTokens], ['length', 3]);
    }
  },
  15: async () => {
    const [{ message, logprobs }] = (await bodyOf(extra({ logprobs: true }))).choices;
    assert.equal(Buffer.from(logprobs.content.flatMap((entry) => entry.bytes)).toString('utf8'), message.content);
    assert.ok(logprobs.content.every((entry) => entry.logprob <= 0 && entry.top_logprobs.length === 0));
    const chunks = rawOf(await partsOf(extra({ logprobs: true })));
    const streamed = chunks.flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []);
    near(streamed.map((entry) => entry.logprob), logprobs.content.map((entry) => entry.logprob));
    return 'read from the response body and the raw chunks';
  },
  16: async () => {
    for (const entry of (await bodyOf(extra({ logprobs: true, top_logprobs: 20 }))).choices[0].logprobs.content) {
      const values = entry.top_logprobs.map((top) => top.logprob);
      assert.equal(values.length, 20);
      assert.deepEqual(values, values.toSorted((a, b) => b - a));
    }
    return 'read from the response body';
  },
  17: async () => {
    const [token] = await tokens('z');
    assert.equal(await said({ maxOutputTokens: 5, ...extra({ logit_bias: { [token]: 100 } }) }), 'zzzzz');
    const greedy = { temperature: 0, maxOutputTokens: 1 }, text = await said(greedy);
    const [first] = await tokens(text);
    assert.notEqual(await said({ ...greedy, ...extra({ logit_bias: { [first]: -100 } }) }), text);
  },
  18: async () => {
    const echoed = await complete({ prompt: '🚂🌊', ...extra({ echo: true, max_tokens: 0 }) });
    assert.equal(echoed.text, 'user:\n🚂🌊\n\nassistant:\n');
    for (let seed = 0; seed < 8; seed++) {
      assert.equal(textOf(await partsOf({ seed, maxOutputTokens: 40 })), await said({ seed, maxOutputTokens: 40 }));
    }
  },
  19: async () => {
    const content = ['Which way would ', 'the ferry go?'].map((text) => ({ type: 'text', text }));
    assert.equal(content.map((part) => part.text).join(''), QUESTION);
    const answer = await chat({ messages: [{ role: 'user', content }] });
    assert.equal(sent(answer).messages[0].content.length, 2);
    assert.equal(answer.text, await said());
  },
  20: async () => {
    const call = { toolCallId: 'call_1', toolName: 'get_time' };
    const messages = [
      ...ASK,
      { role: 'assistant', content: [{ type: 'tool-call', ...call, input: {} }] },
      { role: 'tool', content: [{ type: 'tool-result', ...call, output: { type: 'text', value: 'noon' } }] },
    ];
    const answer = await chat({ messages, tools: { get_time: TIME }, toolChoice: 'none' });
    assert.equal(sent(answer).messages[1].content, null);
    assert.ok(answer.text);
  },
  21: async () => {
    const messages = [{ role: 'user', content: 'A prompt that nobody but the ai SDK has asked, long enough to be kept: 1 2 3 4 5.' }];
    const first = (await chat({ messages })).usage, second = (await chat({ messages })).usage;
    assert.ok(first.inputTokenDetails.cacheReadTokens < 20);
    assert.equal(second.inputTokenDetails.cacheReadTokens, second.inputTokens - 1);
  },
  22: async () => {
    const abort = await opened({ maxOutputTokens: 1900 });
    await speak(1);
    close([abort]);
    await fallsIdle();
  },
  23: async () => {
    let called = 0;
    for (let seed = 0; seed < 6; seed++) {
      const bias = extra({ logit_bias: { [TOOL_CALL]: 2 * seed } });
      const { toolCalls, finishReason } = await chat({ tools: TOOLS, toolChoice: 'auto', seed, maxOutputTokens: 120, ...bias });
      for (const call of toolCalls) isCall(call.toolName, call.input);
      called += toolCalls.length > 0;
      assert.equal(finishReason === 'tool-calls', toolCalls.length > 0);
    }
    assert.ok(called > 0 && called < 6, 'some of these seeds call, some talk');
  },
  24: async () => {
    const tools = { f: tool({ inputSchema: jsonSchema({ type: 'object', properties: { n: { type: 'integer' } }, required: ['n'] }) }) };
    for (let seed = 0; seed < 10; seed++) {
      const answer = await chat({ tools, toolChoice: 'required', seed, maxOutputTokens: 64 });
      assert.deepEqual([answer.finishReason, answer.text], ['tool-calls', '']);
      assert.ok(answer.usage.outputTokens <= 64 && answer.toolCalls.every((call) => Number.isInteger(call.input.n)));
    }
  },
  25: async () => {
    for (const toolName of ['get_weather', 'get_time']) {
      const { toolCalls } = await chat({ tools: TOOLS, toolChoice: { type: 'tool', toolName }, maxOutputTokens: 120 });
      assert.deepEqual(toolCalls.map((call) => call.toolName), [toolName]);
      isCall(toolName, toolCalls[0].input);
    }
  },
  26: async () => {
    const bias = extra({ logit_bias: { [TOOL_CALL]: 100 } });
    const answer = await chat({ tools: { get_weather: TOOLS.get_weather }, toolChoice: 'none', ...bias });
    assert.equal(sent(answer).tool_choice, 'none');
    assert.deepEqual(answer.toolCalls, []);
    assert.doesNotMatch(answer.text, /<tool_call>/);
  },
  27: async () => {
    const [newline] = await tokens('\n');
    const calls = async (more) => {
      const bias = extra({ logit_bias: { [newline]: 100 }, ...more });
      return (await chat({ tools: { get_time: TIME }, toolChoice: 'required', maxOutputTokens: 300, ...bias })).toolCalls.length;
    };
    assert.ok((await calls({})) > 1);
    assert.equal(await calls({ parallel_tool_calls: false }), 1);
  },
  28: async () => {
    const asked = { tools: TOOLS, toolChoice: 'required', maxOutputTokens: 200 };
    const whole = (await chat(asked)).toolCalls, parts = await partsOf(asked), joined = new Map();
    for (const part of parts) {
      if (part.type === 'tool-input-start') joined.set(part.id, { name: part.toolName, input: '' });
      if (part.type === 'tool-input-delta') joined.get(part.id).input += part.delta;
    }
    assert.equal(parts.at(-1).finishReason, 'tool-calls');
    assert.ok([...joined.keys()].every((id) => id.startsWith('call_')));
    assert.deepEqual([...joined.values()].map((call) => [call.name, JSON.parse(call.input)]), whole.map((call) => [call.toolName, call.input]));
  },
  29: async () => {
    const tools = { book: tool({ inputSchema: jsonSchema(NESTED_RULES) }) };
    for (let seed = 0; seed < 5; seed++) {
      const one = extra({ parallel_tool_calls: false });
      isBooking((await chat({ tools, toolChoice: 'required', seed, maxOutputTokens: 200, ...one })).toolCalls[0].input);
    }
  },
  30: async () => {
    const asked = { tools: { get_time: TIME }, toolChoice: 'required' };
    const error = await fault({ ...asked, maxOutputTokens: 8 });
    assert.deepEqual([error.statusCode, error.data.error.code], [400, 'budget_too_small']);
    const needed = Number(/ takes (\d+)/.exec(error.message)[1]);
    assert.equal((await chat({ ...asked, maxOutputTokens: needed })).finishReason, 'tool-calls');
    assert.equal((await fault({ ...asked, maxOutputTokens: needed - 1 })).statusCode, 400);
  },
  31: async () => {
    const tools = { get_time: TIME };
    const call = await chat({ tools, toolChoice: 'required', maxOutputTokens: 100, ...extra({ parallel_tool_calls: false }) });
    const [{ toolCallId, toolName }] = call.toolCalls;
    const told = async (value) => {
      const result = { role: 'tool', content: [{ type: 'tool-result', toolCallId, toolName, output: { type: 'text', value } }] };
      const messages = [...ASK, ...call.finalStep.response.messages, result];
      return (await chat({ messages, tools, temperature: 0, toolChoice: 'none' })).usage.inputTokens;
    };
    assert.ok((await told('midnight in the harbour')) > (await told('noon')));
  },
  32: async () => {
    for (let seed = 0; seed < 5; seed++) {
      const { output } = await chat({ output: Output.json(), seed, maxOutputTokens: 40 });
      assert.ok(output !== null && typeof output === 'object' && !Array.isArray(output));
    }
  },
  33: async () => {
    const output = Output.object({ schema: jsonSchema(WEATHER_RULES) });
    for (let seed = 0; seed < 5; seed++) isWeather((await chat({ output, seed, maxOutputTokens: 60 })).output);
  },
  34: async () => {
    const Plan = z.object({ steps: z.array(z.object({ kind: z.enum(['go', 'stop']), metres: z.int() })), note: z.string().nullable() });
    const answer = await chat({ output: Output.object({ schema: Plan }), maxOutputTokens: 80, seed: 1 });
    assert.deepEqual(Plan.parse(JSON.parse(answer.text)), answer.output);
    return 'tested with `Output.object` and a Zod schema';
  },
  35: async () => {
    const error = await fault({ output: Output.object({ schema: jsonSchema(UNIQUE_RULES) }) });
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /uniqueItems/);
  },
  36: async () => {
    const answer = await complete();
    assert.equal(answer.finalStep.response.body.object, 'text_completion');
    assert.equal(answer.usage.inputTokens, (await tokens(PROMPT)).length);
    assert.ok(answer.text);
    return 'the SDK puts the text to complete between `user:` and `assistant:`';
  },
  40: async () => {
    const { fim_prefix, fim_suffix, fim_middle } = facts.control;
    const ids = [fim_prefix, ...(await tokens(PROMPT)), fim_suffix, ...(await tokens('\nadd(1, 2)')), fim_middle];
    const answer = await complete(extra({ suffix: '\nadd(1, 2)' }));
    const direct = await post('/v1/completions', { prompt: ids, max_tokens: 8, seed: 3 });
    assert.equal(answer.text, direct.choices[0].text);
    assert.equal(answer.usage.inputTokens, ids.length);
  },
  41: async () => {
    const answer = await complete(extra({ echo: true, logprobs: 2, max_tokens: 0 }));
    isScored(answer.finalStep.response.body.choices[0], PROMPT, 2);
    return 'read from the response body';
  },
  42: async () => {
    const parts = await partsOf({ ...COMPLETION, model: counting.completionModel('nano'), ...extra({ echo: true }) });
    assert.equal(textOf(parts), PROMPT + (await complete()).text);
    assert.ok(['stop', 'length'].includes(parts.at(-1).finishReason) && parts.at(-1).totalUsage.outputTokens > 0);
  },
  43: async () => {
    const error = await fault({ model: plain.chatModel('gpt-4o') });
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /served: nano, other, judge/);
  },
  45: async () => {
    const error = await fault({ temperature: -1 });
    assert.deepEqual([error.statusCode, error.data.error.param], [400, 'temperature']);
  },
  46: async () => {
    const error = await fault({ messages: [{ role: 'user', content: 'ab '.repeat(3000) }] });
    assert.deepEqual([error.statusCode, error.data.error.code], [400, 'context_length_exceeded']);
    assert.match(error.message, /2048/);
    assert.ok(await said());
  },
  47: async () => {
    for (const rules of BAD_RULES) assert.equal((await fault({ output: Output.object({ schema: jsonSchema(rules) }) })).statusCode, 400);
  },
  48: async () => {
    for (const apiKey of ['wrong', `${facts.key}-not`, facts.key.toUpperCase()]) {
      assert.equal((await fault({ model: provider({ apiKey }).chatModel('nano') })).statusCode, 401);
    }
    assert.ok(await said());
  },
  49: async () => {
    const busy = [];
    for (let seed = 0; seed < 40; seed++) busy.push(await opened({ maxOutputTokens: 1900, seed }));
    try {
      const error = await fault();
      assert.deepEqual([error.statusCode, error.data.error.code], [429, 'queue_full']);
      assert.ok(Number(error.responseHeaders['retry-after']) >= 1);
      setTimeout(() => close(busy), 300);
      assert.ok(await said({ maxRetries: PATIENCE }));
    } finally {
      close(busy);
    }
    await fallsIdle();
  },
};

await run(rows, {
  1: 'the client has no call that lists models',
  2: 'the client has no call that lists models',
  3: 'the client has no call that lists models; row 43 covers a chat with an unknown model',
  37: 'the SDK completes only one text per call',
  38: 'the SDK accepts only text as a prompt',
  39: 'the SDK accepts only text as a prompt',
  44: 'the SDK rejects an empty list of messages before it sends a request',
});

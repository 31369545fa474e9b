// Shared by the JavaScript clients: questions, expected values from the server itself, and the reporting of rows.
//
// argv[2] is JSON from the driver: {url, key, control: {name: id}}. Each row is reported as one line of JSON:
//   {row, state: "pass" | "absent" | "FAIL", why}

import assert from 'node:assert/strict';

export const facts = JSON.parse(process.argv[2]);
export const BASE = `${facts.url}/v1`;
export const QUESTION = 'Which way would the ferry go?';
export const ASK = [{ role: 'user', content: QUESTION }];
export const WEATHER_RULES = {
  type: 'object', properties: { city: { type: 'string' }, unit: { enum: ['C', 'F'] } }, required: ['city'],
};
export const NESTED_RULES = {
  type: 'object',
  properties: {
    place: {
      type: 'object',
      properties: { zip: { type: 'string', pattern: '^[0-9]{5}$' }, side: { enum: ['left', 'right'] } },
      required: ['zip', 'side'],
    },
    days: { type: 'array', items: { type: 'integer', minimum: 1, maximum: 7 }, minItems: 1, maxItems: 3 },
  },
  required: ['place', 'days'],
};
export const UNIQUE_RULES = {
  type: 'object', properties: { a: { type: 'array', items: { type: 'integer' }, uniqueItems: true } },
};
export const BAD_RULES = [{ type: 'nothing' }, { $ref: 'https://example.com/schema.json' }, { properties: 3 }];
export const PATIENCE = 5; // tries after a 429

async function request(path, body) {
  const headers = { authorization: `Bearer ${facts.key}`, 'content-type': 'application/json' };
  const response = await fetch(facts.url + path, body ? { method: 'POST', headers, body: JSON.stringify(body) } : { headers });
  assert.equal(response.status, 200, path);
  return response;
}

export const post = async (path, body) => (await request(path, { model: 'nano', ...body })).json();
export const tokens = async (text) => (await post('/tokenize', { prompt: text })).tokens;

// The number of rows that generate now, over all models.
async function running() {
  const text = await (await request('/metrics')).text();
  const counts = [...text.matchAll(/^stagecoach:num_requests_running\{[^}]*\} (\S+)/gm)];
  return counts.reduce((sum, found) => sum + Number(found[1]), 0);
}

async function becomes(count, seconds) {
  const deadline = performance.now() + 1000 * seconds;
  while ((await running()) !== count && performance.now() < deadline) await new Promise((go) => setTimeout(go, 10));
  assert.equal(await running(), count, 'rows that speak');
}

// A new stream sends its role before it gets a row; a row is free within a second, since a step takes milliseconds.
export const speak = (count) => becomes(count, 5);
export const fallsIdle = () => becomes(0, 1);

// The error with which a promise rejects.
export async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail('nothing was refused');
}

// -- checks of an answer, for every client -----------------------------------------------------------------------------

const keysWithin = (object, allowed) => assert.deepEqual(Object.keys(object).filter((key) => !allowed.includes(key)), []);

export function isWeather(value) {
  keysWithin(value, ['city', 'unit']);
  assert.equal(typeof value.city, 'string');
  assert.ok(!('unit' in value) || ['C', 'F'].includes(value.unit));
}

export function isCall(name, value) {
  if (name === 'get_weather') isWeather(value);
  else assert.deepEqual([name, value], ['get_time', {}]);
}

export function isBooking({ place, days, ...rest }) {
  assert.deepEqual(rest, {});
  keysWithin(place, ['zip', 'side']);
  assert.match(place.zip, /^[0-9]{5}$/);
  assert.ok(['left', 'right'].includes(place.side));
  assert.ok(days.length >= 1 && days.length <= 3 && days.every((day) => Number.isInteger(day) && day >= 1 && day <= 7));
}

export function near(found, expected) {
  assert.equal(found.length, expected.length);
  found.forEach((value, index) => assert.ok(Math.abs(value - expected[index]) <= 1e-4, `${value}, not ${expected[index]}`));
}

// Checks a prompt's log-probabilities as /v1/completions returns them, with `top` alternatives each.
export function isScored({ text, logprobs }, prompt, top) {
  assert.equal(text, prompt);
  assert.equal(logprobs.tokens.join(''), prompt);
  assert.equal(logprobs.token_logprobs[0], null);
  assert.ok(logprobs.token_logprobs.slice(1).every((value) => value < 0));
  assert.ok(logprobs.top_logprobs.slice(1).every((entry) => Object.keys(entry).length === top));
  let offset = 0;
  const offsets = logprobs.tokens.map((token) => (offset += token.length) - token.length);
  assert.deepEqual(logprobs.text_offset, offsets);
}

// A token has the same log-probability when generated as when its text is scored, if the text is again a single token.
export async function isScoredAsSaid(say, score) {
  const prompt = await tokens('The pilot asked');
  let compared = 0;
  for (let seed = 0; seed < 8; seed++) {
    const said = await say(seed), text = 'The pilot asked' + said.text;
    if (JSON.stringify((await tokens(text)).slice(0, -1)) !== JSON.stringify(prompt)) continue;
    near((await score(text)).logprobs.token_logprobs.slice(-1), said.logprobs.token_logprobs);
    compared += 1;
  }
  assert.ok(compared, 'none of eight tokens is a single token again when its text is encoded');
}

// -- reporting ---------------------------------------------------------------------------------------------------------

const tell = (row, state, why = '') => console.log(JSON.stringify({ row: Number(row), state, why }));

// `rows`: number -> test; a test may return a note, such as what the client does not show. `absent`: number -> reason.
export async function run(rows, absent) {
  for (const [row, why] of Object.entries(absent)) tell(row, 'absent', why);
  for (const [row, test] of Object.entries(rows)) {
    try {
      tell(row, 'pass', await test());
    } catch (error) {
      tell(row, 'FAIL', String(error?.stack ?? error).split('\n').slice(0, 12).join(' | '));
    }
  }
}

// What the JavaScript clients share: their questions, the server's own word for an oracle, and the telling of rows.
//
// argv[2] holds the driver's facts: {url, key, control: {name: id}}. Each row ends as one line of JSON:
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

// Rows that speak now, of all models.
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

// An opened stream tells its role before it has a row; a row is free within a second, a step takes a few milliseconds.
export const speak = (count) => becomes(count, 5);
export const fallsIdle = () => becomes(0, 1);

// The error that a promise ends with.
export async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  assert.fail('nothing was refused');
}

// -- what holds of an answer, whoever brought it -----------------------------------------------------------------------

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

// The prompt's log-probabilities as /v1/completions tells them, `top` alternatives each.
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

// A token has the same log-probability when it is said as when its text is scored, where it is read as one token again.
export async function isScoredAsSaid(say, score) {
  const prompt = await tokens('The pilot asked');
  let compared = 0;
  for (let seed = 0; seed < 8; seed++) {
    const said = await say(seed), text = 'The pilot asked' + said.text;
    if (JSON.stringify((await tokens(text)).slice(0, -1)) !== JSON.stringify(prompt)) continue;
    near((await score(text)).logprobs.token_logprobs.slice(-1), said.logprobs.token_logprobs);
    compared += 1;
  }
  assert.ok(compared, 'one of eight tokens is whole text');
}

// -- telling -----------------------------------------------------------------------------------------------------------

const tell = (row, state, why = '') => console.log(JSON.stringify({ row: Number(row), state, why }));

// `rows`: number -> test; a test may return what the client does not show, as a note. `absent`: number -> why not.
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

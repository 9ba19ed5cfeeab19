// openai-node and the AI SDK against a running server: `node check.mjs URL`. Runs in the folder that has node_modules.
import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const url = process.argv[2];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Count from one to one hundred." }];
const prompt = "The capital of France is";

const chat = (fields) => client.chat.completions.create({ model, messages, temperature: 0, ...fields });
const complete = (fields) => client.completions.create({ model, prompt, temperature: 0, ...fields });

async function all(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

// One number: the sum of a metric's samples whose labels hold a text.
async function metric(name, label = "") {
  const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
  const samples = lines.filter((line) => line.startsWith(`${name}{`) && line.includes(label));
  assert.ok(samples.length > 0, `/metrics has no ${name} ${label}`);
  return samples.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

async function waitUntilIdle() {
  const deadline = Date.now() + 20_000;
  while ((await metric("vllm:num_requests_running")) + (await metric("vllm:num_requests_waiting")) > 0) {
    assert.ok(Date.now() < deadline, "requests are still running after 20 s");
    await pause(50);
  }
}

const checks = {
  "models are listed and found": async () => {
    assert.equal((await client.models.retrieve(model)).id, model);
    await assert.rejects(client.models.retrieve("no-such-model"), { code: "model_not_found", status: 404 });
  },

  "chat stream says the same as chat, with usage": async () => {
    const whole = await chat({ max_tokens: 12 });
    assert.equal(whole.choices[0].finish_reason, "length");
    assert.equal(whole.usage.completion_tokens, 12);
    assert.ok(whole._request_id);
    const chunks = await all(await chat({ max_tokens: 12, stream: true, stream_options: { include_usage: true } }));
    const last = chunks.pop();
    assert.equal(chunks.map((c) => c.choices[0].delta.content ?? "").join(""), whole.choices[0].message.content);
    assert.deepEqual(last.choices, []);
    assert.equal(last.usage.completion_tokens, 12);
  },

  "the stream helper sums up the stream": async () => {
    const runner = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 12 });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, (await chat({ max_tokens: 12 })).choices[0].message.content);
  },

  "n choices and logprobs": async () => {
    const answer = await chat({ n: 2, temperature: 1, seed: 5, max_tokens: 6, logprobs: true, top_logprobs: 2 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    for (const { message, logprobs } of answer.choices) {
      assert.equal(logprobs.content.map((entry) => entry.token).join(""), message.content);
      assert.ok(logprobs.content.every((entry) => entry.top_logprobs.length === 2));
    }
  },

  "completions, whole and streamed, echo": async () => {
    const whole = (await complete({ max_tokens: 8 })).choices[0].text;
    const chunks = await all(await complete({ max_tokens: 8, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole);
    assert.equal((await complete({ max_tokens: 8, echo: true })).choices[0].text, prompt + whole);
    const two = await complete({ prompt: [prompt, "Once upon a time"], max_tokens: 2 });
    assert.deepEqual(two.choices.map((choice) => choice.index), [0, 1]);
  },

  "errors have class, code and param": async () => {
    const bad = await chat({ temperature: 3 }).catch((error) => error);
    assert.ok(bad instanceof OpenAI.BadRequestError, `${bad}`);
    assert.deepEqual([bad.code, bad.param], ["invalid_value", "temperature"]);
    assert.ok(bad.requestID);
    const unknown = await complete({ model: "no-such-model" }).catch((error) => error);
    assert.ok(unknown instanceof OpenAI.NotFoundError, `${unknown}`);
    assert.equal(unknown.code, "model_not_found");
  },

  "who leaves mid stream frees the request": async () => {
    const before = await metric("vllm:request_success_total", 'finished_reason="abort"');
    const stream = await chat({ max_tokens: 1500, ignore_eos: true, stream: true });
    for await (const _ of stream) break; // leaving the loop aborts the request
    await waitUntilIdle();
    assert.equal(await metric("vllm:request_success_total", 'finished_reason="abort"'), before + 1);
  },

  "the AI SDK generates and streams": async () => {
    const provider = createOpenAICompatible({ name: "pointsman", baseURL: `${url}/v1`, includeUsage: true });
    const fields = { model: provider(model), prompt: messages[0].content, temperature: 0, maxOutputTokens: 12 };
    const whole = await generateText({ ...fields, maxRetries: 0 });
    assert.equal(whole.text, (await chat({ max_tokens: 12 })).choices[0].message.content);
    assert.equal(whole.finishReason, "length");
    assert.equal(whole.usage.outputTokens, 12);
    const streamed = streamText({ ...fields, maxRetries: 0 });
    assert.equal((await all(streamed.textStream)).join(""), whole.text);
    assert.equal((await streamed.usage).outputTokens, 12);
    const refused = await generateText({ ...fields, temperature: 3, maxRetries: 0 }).catch((error) => error);
    assert.equal(refused.statusCode, 400);
    assert.match(refused.message, /temperature/);
  },
};

for (const [name, run] of Object.entries(checks)) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    console.log(`FAILED ${name}\n${error.stack}`);
    process.exitCode = 1;
  }
}

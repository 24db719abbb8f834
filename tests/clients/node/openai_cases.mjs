// OpenAI's client.
import OpenAI from "openai";
import { assert, run, target } from "./harness.mjs";

const api = new OpenAI({ baseURL: target.base, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story about a dog." }];
const chat = (fields) => api.chat.completions.create({ model: target.model, messages, max_tokens: 8, ...fields });

async function text(stream) {
  let said = "";
  for await (const chunk of stream) {
    const choice = chunk.choices[0];
    if (choice?.index === 0) said += choice.delta?.content ?? choice.text ?? "";
  }
  return said;
}

await run(
  {
    models: async () => assert((await api.models.list()).data[0].id === target.model),
    model: async () => assert((await api.models.retrieve(target.model)).id === target.model),
    chat: async () => {
      const answer = await chat();
      assert(answer.choices[0].message.content && answer.usage.completion_tokens === 8);
    },
    "chat-stream": async () => assert(await text(await chat({ stream: true }))),
    "chat-stream-usage": async () => {
      let usage;
      for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
        usage = chunk.usage ?? usage;
      }
      assert(usage.completion_tokens === 8);
    },
    "chat-stream-helper": async () => {
      const stream = api.chat.completions.stream({ model: target.model, messages, max_tokens: 8 });
      assert((await stream.finalChatCompletion()).choices[0].message.content);
    },
    completion: async () => {
      const answer = await api.completions.create({ model: target.model, prompt: "Once upon a time", max_tokens: 4 });
      assert(answer.choices[0].text);
    },
    "completion-stream": async () => {
      const fields = { model: target.model, prompt: "Once upon a time", max_tokens: 4, stream: true };
      assert(await text(await api.completions.create(fields)));
    },
    "chat-logprobs": async () => {
      const answer = await chat({ logprobs: true, top_logprobs: 2 });
      assert(answer.choices[0].logprobs.content.length === 8);
    },
    "max-tokens-beyond-the-context": async () => {
      assert((await chat({ max_tokens: 65535 })).choices[0].max_tokens < 65535);
    },
    "prompt-beyond-the-context": async () => {
      try {
        await chat({ messages: [{ role: "user", content: "word ".repeat(3000) }] });
      } catch (error) {
        return assert(error.code === "context_length_exceeded" && error.param === "messages");
      }
      return assert(false, "taken");
    },
    "answers-sent-back": async () => {
      const said = (await chat()).choices[0].message;
      assert((await chat({ messages: [...messages, said, { role: "user", content: "And?" }] })).choices[0].message.content);
    },
    "structured-output": async () => {
      const schema = { type: "object", properties: { name: { enum: ["Tom", "Eva"] } }, required: ["name"], additionalProperties: false };
      const answer = await chat({ max_tokens: 40, response_format: { type: "json_schema", json_schema: { name: "a", schema } } });
      assert(["Tom", "Eva"].includes(JSON.parse(answer.choices[0].message.content).name));
    },
    "run-tools": async () => {
      const tool = { name: "f", parameters: { type: "object", properties: {} }, function: () => "5", parse: JSON.parse };
      const runner = api.chat.completions.runTools({ model: target.model, messages, tools: [{ type: "function", function: tool }] });
      assert(await runner.finalContent());
    },
    embeddings: () => api.embeddings.create({ model: target.model, input: "x" }),
    responses: () => api.responses.create({ model: target.model, input: "x" }),
  },
  async (sends) => assert((await chat(sends)).choices[0].message.content === (await text(await chat({ ...sends, stream: true })))),
);

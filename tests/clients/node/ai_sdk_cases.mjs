// The AI SDK.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, NoObjectGeneratedError, streamText, tool } from "ai";
import { z } from "zod";
import { assert, run, target } from "./harness.mjs";

const like = createOpenAICompatible({ name: "blockrelay", baseURL: target.base, includeUsage: true });
const structured = createOpenAICompatible({ name: "blockrelay", baseURL: target.base, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: target.base, apiKey: "unused" });
const common = { prompt: "Tell me a story about a dog.", maxOutputTokens: 8, maxRetries: 0 };
const model = like(target.model);
const tools = { where: tool({ description: "x", inputSchema: z.object({ city: z.string() }), execute: async () => "here" }) };
const schema = z.object({ name: z.enum(["Tom", "Eva"]) });

async function streamed(fields) {
  let failed;
  const answer = streamText({ ...common, onError: ({ error }) => (failed = error), ...fields });
  let said = "";
  for await (const part of answer.textStream) said += part;
  if (failed) throw failed;
  return { said, usage: await answer.usage };
}

await run({
  "generate-text": async () => assert((await generateText({ model, ...common })).text),
  "stream-text": async () => {
    const { said, usage } = await streamed({ model });
    assert(said && usage.outputTokens === 8);
  },
  messages: async () => {
    const { prompt, ...rest } = common;
    const messages = [
      { role: "user", content: prompt },
      { role: "assistant", content: "Tom had a dog." },
      { role: "user", content: [{ type: "text", text: "And?" }] },
    ];
    assert((await generateText({ model, system: "Be brief.", messages, ...rest })).text);
  },
  "seed-and-temperature": async () => {
    const once = () => generateText({ model, ...common, seed: 3, temperature: 1 });
    assert((await once()).text === (await once()).text);
  },
  "stop-sequences": async () => assert((await generateText({ model, ...common, stopSequences: ["THE END"] })).text),
  "completion-model": async () => {
    assert((await generateText({ model: like.completionModel(target.model), ...common, prompt: "Once upon a time" })).text);
  },
  "openai-chat": async () => assert((await generateText({ model: openai.chat(target.model), ...common })).text),
  "openai-default": () => generateText({ model: openai(target.model), ...common }),
  penalties: () => generateText({ model, ...common, presencePenalty: 0.5 }),
  tools: () => generateText({ model, ...common, tools }),
  "tools-streamed": () => streamed({ model, tools }),
  "generate-object": async () => {
    try {
      await generateObject({ model, schema, ...common });
    } catch (error) {
      if (!NoObjectGeneratedError.isInstance(error)) throw error;
      assert(error.text.startsWith("{")); // which object, a larger model would know
    }
  },
  "generate-object-schema": async () => {
    const answer = await generateObject({ model: structured(target.model), schema, ...common, maxOutputTokens: 40 });
    assert(["Tom", "Eva"].includes(answer.object.name));
  },
});

// LangChain's OpenAI package.
import { AIMessage, HumanMessage, SystemMessage } from "@langchain/core/messages";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { assert, run, target } from "./harness.mjs";

const common = { model: target.model, apiKey: "unused", maxRetries: 0, maxTokens: 6, configuration: { baseURL: target.base } };
const chat = (fields) => new ChatOpenAI({ ...common, ...fields });
const prompt = "Tell me a story about a dog.";
const schema = { type: "object", properties: { name: { enum: ["Tom", "Eva"] } }, required: ["name"], additionalProperties: false };

async function text(stream) {
  let said = "";
  for await (const chunk of stream) said += chunk.content ?? chunk;
  return said;
}

await run({
  invoke: async () => {
    const answer = await chat().invoke(prompt);
    assert(answer.content && answer.usage_metadata.output_tokens === 6);
  },
  stream: async () => assert(await text(await chat({ streamUsage: true }).stream(prompt))),
  batch: async () => assert((await chat().batch([prompt, "Who is Tom?"])).every((answer) => answer.content)),
  conversation: async () => {
    const said = [new SystemMessage("Be brief."), new HumanMessage(prompt), new AIMessage("Tom."), new HumanMessage("And?")];
    assert((await chat().invoke(said)).content);
  },
  completion: async () => assert(await new OpenAI(common).invoke("Once upon a time")),
  "completion-stream": async () => assert(await text(await new OpenAI(common).stream("Once upon a time"))),
  "bind-tools": () =>
    chat().bindTools([{ type: "function", function: { name: "f", parameters: schema } }]).invoke(prompt),
  "structured-output": async () => {
    const asking = chat({ maxTokens: 40 }).withStructuredOutput(schema, { name: "person", method: "jsonSchema" });
    assert(["Tom", "Eva"].includes((await asking.invoke(prompt)).name));
  },
  "structured-output-by-tools": () =>
    chat().withStructuredOutput(schema, { name: "person", method: "functionCalling" }).invoke(prompt),
  "json-mode": async () => {
    const asking = chat().withStructuredOutput(schema, { method: "jsonMode", includeRaw: true });
    assert((await asking.invoke(prompt)).raw.content.startsWith("{")); // which object, a larger model would know
  },
  responses: () => chat({ useResponsesApi: true }).invoke(prompt),
  embeddings: () => new OpenAIEmbeddings(common).embedQuery("x"),
});

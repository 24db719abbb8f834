// Runs the cases of a client, as ../python/harness.py does: the same arguments, table and words.
import { readFileSync } from "node:fs";

const [url, model] = process.argv.slice(2);
export const target = { url, model, base: `${url}/v1` };
const message = (error) => String(error?.message ?? error);

export function assert(holds, said = "not as it should be") {
  if (!holds) throw new Error(said);
}

// Status, and the field that the gateway named, of the answer behind an exception; undefined where there was none.
function refusal(error) {
  for (let one = error; one; one = one.cause ?? one.lastError) {
    const status = one.status ?? one.statusCode;
    if (status >= 400) {
      const body = one.data?.error ?? one.error ?? {};
      const found = /([a-z_.0-9]+) is not supported/.exec(message(one));
      return `${status} ${one.param ?? body.param ?? found?.[1] ?? ""}`.trimEnd();
    }
  }
  return undefined;
}

async function outcome(one, sends) {
  try {
    await one(sends);
    return "works";
  } catch (error) {
    const told = refusal(error);
    if (!told) console.error(error);
    return told ?? `${error?.name}: ${message(error)}`.slice(0, 300);
  }
}

// `sends` runs the cases that have fields and no function of their own.
export async function run(cases, sends) {
  const table = JSON.parse(readFileSync(0, "utf8"));
  const found = {};
  for (const [name, row] of Object.entries(table)) {
    const one = cases[name] ?? ("sends" in row ? sends : undefined);
    found[name] = one ? await outcome(one, row.sends) : "has no function";
  }
  for (const name of Object.keys(cases)) found[name] ??= "is not in the table";
  console.log(JSON.stringify(found));
}

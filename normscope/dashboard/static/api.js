// Questions to the server. What did not change since the same question was asked last is answered with the same object.

const known = new Map(); // address → { tag, content }
const MOST_KNOWN = 60;

export class Refused extends Error {}

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null) query.append(name, each);
    }
  }
  const address = `/api/${path}?${query}`;
  const before = known.get(address);
  const answer = await fetch(address, { cache: "no-store", headers: before ? { "If-None-Match": before.tag } : {} });
  if (answer.status === 304) return before.content;
  const content = answer.headers.get("content-type")?.startsWith("application/json") ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Refused(content.error ?? `the server answered ${answer.status}`);
  known.delete(address);
  known.set(address, { tag: answer.headers.get("etag"), content });
  if (known.size > MOST_KNOWN) known.delete(known.keys().next().value);
  return content;
}

/* Requests to the server: with the API key if there is one, and errors in words. */

const KEY = "falconet-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The server answered with an error. `after`: seconds to wait, if it said so. */
export class Refused extends Error {
  constructor(status, reason, { after, used }) {
    super(reason);
    Object.assign(this, { status, after, used });
  }
}

/** No answer came: the server is stopped, or the connection was cut. */
export class Unreachable extends Error {}

/** Send a request and return the answer's JSON; addresses are relative, so that a proxy may add a prefix. */
export async function ask(address, options = {}) {
  const used = key.get();
  const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
  let response, text;
  try {
    response = await fetch(address, { cache: "no-store", ...options, headers });
    text = await response.text();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Unreachable("The server does not answer.");
  }
  const content = parsed(text);
  if (!response.ok || content === undefined) {
    const reason = content?.error ?? (response.ok ? "the answer is not JSON" : `the server answered ${response.status}`);
    const after = Number.parseFloat(response.headers.get("Retry-After"));
    throw new Refused(response.status, String(reason), { after: Number.isFinite(after) ? after : undefined, used });
  }
  return content;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Each version of each model that the server has, ready or not. */
export const models = () => ask("v2/repository/index", { method: "POST" });

/** The classes and the preprocessing of a model. */
export const metadata = ({ name, version }) =>
  ask(`v2/models/${encodeURIComponent(name)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`);

/** Whether the server is up and ready. */
export async function health() {
  try {
    await ask("v2/health/ready");
    return "ready";
  } catch (error) {
    return error instanceof Unreachable ? "unreachable" : "not ready";
  }
}

/** The address that classifies a photo. */
export function predictAddress(model, top) {
  const query = new URLSearchParams({ top });
  if (model) query.set("model", model.name);
  if (model?.pinned) query.set("version", model.version);
  return `predict?${query}`;
}

/** Classify one photo, in a form: a body that is no photo might be read as something else. Its name stays here. */
export async function predict(file, { model, top, signal }) {
  const body = new FormData();
  body.append("photo", file, "photo");
  try {
    return await ask(predictAddress(model, top), { method: "POST", body, signal });
  } catch (error) {
    if (error instanceof Refused) error.message = error.message.replace(/^photo: /, ""); // the card has a name
    throw error;
  }
}

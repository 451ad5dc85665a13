/* The page: photos come in by a file chooser, a drop, the clipboard or a camera, and are classified a few at a time. */

import { Card, SHOWN } from "./cards.js";
import { health, key, metadata, models, predict, predictAddress, Refused, Unreachable } from "./server.js";
import { counted, csv, percent, record, sentence } from "./words.js";

const AT_ONCE = 3; // requests; the server gathers them into batches
const MOST_CLASSES = 20; // requested; all after the first few are shown on demand
const TRIES = 8; // per photo while the server is too busy
const LONGEST_WAIT = 30; // seconds before another try
const SPOKEN = 5; // photos sent together whose results a screen reader hears one by one
const LOOK = { well: 15_000, unwell: 3_000 }; // milliseconds between checks of the server's health

const at = (id) => document.getElementById(id);
const photos = []; // in the order of the page
const waiting = []; // photos to send
const sending = new Set();
const served = { list: [], chosen: undefined, classes: SHOWN };
let batch = { size: 0, done: 0 }; // since nothing was left to send
let pausedUntil = 0; // when an overloaded server expects the next photo
let state = "unknown"; // of the server
let isLocked = false; // until a key is given

/* Photos: in, sent, answered. */

function add(files) {
  const added = [...files].map((file) => {
    const photo = { file };
    photo.card = new Card(file, {
      again: () => send([photo]),
      copy: (button) => copy(button, JSON.stringify(record(photo), null, 2)),
      remove: () => remove(photo),
    });
    return photo;
  });
  if (!added.length) return;
  photos.unshift(...added); // the newest are on top, and each group keeps its order
  at("cards").prepend(...added.map(({ card }) => card.element));
  send(added);
}

function send(some) {
  for (const photo of some) {
    photo.answer = photo.error = undefined;
    photo.stop = new AbortController();
    photo.card.say("waiting", "Waiting");
  }
  waiting.push(...some);
  batch.size += some.length;
  while (sending.size < AT_ONCE && waiting.length) start(waiting.shift());
  refresh();
}

async function start(photo) {
  sending.add(photo);
  try {
    photo.answer = await classified(photo);
    photo.card.answer(photo.answer);
    if (served.chosen && photo.answer.version !== served.chosen.version) list(); // a new checkpoint was swapped in
  } catch (error) {
    fail(photo, error);
  }
  sending.delete(photo);
  batch.done += 1;
  if (batch.size <= SPOKEN) speak(spoken(photo));
  if (waiting.length) start(waiting.shift());
  else if (!sending.size) finish();
  refresh();
}

/** The answer for a photo, after as many tries as an overloaded server or a missing key makes necessary. */
async function classified(photo) {
  const { file, card, stop: { signal } } = photo;
  await readable(file);
  for (let tries = 1; ; tries += 1) {
    while (performance.now() < pausedUntil) await sleep(pausedUntil - performance.now(), signal);
    card.say("sending", "Classifying");
    const begun = performance.now();
    try {
      const answer = await predict(file, { model: served.chosen, top: Math.min(served.classes, MOST_CLASSES), signal });
      const prediction = answer.predictions[0];
      if (prediction.error) throw new Refused(400, prediction.error, {});
      return { ...answer, prediction, roundTrip: Math.round(10 * (performance.now() - begun)) / 10 };
    } catch (error) {
      if (error.status === 401 && (error.used !== key.get() || (await askForKey(error)))) continue;
      if (!(isBusy(error) && tries < TRIES)) throw error;
      const seconds = Math.min(error.after ?? 2 ** (tries - 1), LONGEST_WAIT);
      pausedUntil = Math.max(pausedUntil, performance.now() + 1000 * seconds);
      card.say("waiting", `The server is busy. Trying again in ${counted(Math.ceil(seconds), "second")}.`);
    }
  }
}

const isBusy = (error) => error.status === 429 || (error.status === 503 && error.after !== undefined);

/** Fail if the file is gone; a request with it would look like a lost connection. */
async function readable(file) {
  try {
    await file.slice(0, 1).arrayBuffer();
  } catch {
    throw new Refused(400, "the file cannot be read; was it moved or changed?", {});
  }
}

async function fail(photo, error) {
  const { card, stop } = photo;
  if (stop.signal.aborted) {
    photo.error = new Error("Cancelled.");
    card.say("cancelled", "Cancelled", { again: true });
    return;
  }
  if (!(error instanceof Refused || error instanceof Unreachable)) throw error; // a mistake of this page
  photo.error = error;
  const isFinal = [400, 411, 413, 415].includes(error.status); // the same photo would be refused again
  card.fail(error.message, { again: !isFinal });
  if (error instanceof Unreachable && (await look()) === "ready" && photo.error === error) {
    card.fail("the connection was cut before the answer; the photo may be too large", { again: true });
  }
  if (error.status === 404) list(); // the model has been unloaded
}

function finish() {
  const failed = photos.filter(({ error }) => error).length;
  if (batch.size > SPOKEN) speak(`${counted(batch.done, "photo")} done${failed ? `, ${failed} without a result` : ""}.`);
  batch = { size: 0, done: 0 };
}

function cancel() {
  for (const photo of waiting.splice(0)) {
    photo.stop.abort();
    batch.done += 1;
    fail(photo);
  }
  for (const photo of sending) photo.stop.abort();
  refresh();
}

function remove(photo) {
  const place = photos.indexOf(photo);
  const next = photos[place + 1] ?? photos[place - 1];
  photo.stop.abort();
  if (waiting.includes(photo)) {
    waiting.splice(waiting.indexOf(photo), 1);
    batch.size -= 1;
  }
  photos.splice(place, 1);
  photo.card.close();
  (next?.card.find(".remove") ?? at("choose")).focus();
  refresh();
}

function clear() {
  cancel();
  for (const { card } of photos.splice(0)) card.close();
  at("choose").focus();
  speak("All photos removed.");
  refresh();
}

const spoken = ({ file, answer, error }) =>
  answer
    ? `${file.name}: ${answer.prediction.label}, ${percent(answer.prediction.probability)}.`
    : `${file.name}: ${sentence(error.message)}`;

/** Bring what depends on all photos up to date. */
function refresh() {
  const isSending = sending.size + waiting.length > 0;
  const repeatable = photos.filter(({ card }) => !card.find(".again").hidden);
  at("results").hidden = !photos.length;
  document.body.classList.toggle("has-results", photos.length > 0);
  if (!isSending && document.activeElement === at("cancel")) at("copy-all").focus();
  at("sending").hidden = !isSending;
  at("progress").max = batch.size || 1;
  at("progress").value = batch.done;
  at("count").textContent = isSending ? `${batch.done} of ${batch.size}` : counted(photos.length, "photo");
  at("retry").hidden = repeatable.length < 2;
  at("retry").textContent = `Try ${repeatable.length} again`;
}

/* The server: its models, its health, its key. */

/** Look whether the server is well, and, at first and after a change, which models it has. */
async function look({ asking = false } = {}) {
  const before = state;
  state = await health();
  if (state === "unreachable") notice("The server does not answer. It may have been stopped; this page keeps trying.");
  else if (before !== state || (!served.chosen && !isLocked)) await list({ asking });
  return state;
}

/** Ask for the models; `asking`: also for the key, if it is needed, as nothing can be shown without. */
async function list({ asking = false } = {}) {
  try {
    served.list = await models();
    isLocked = false;
    at("forget").hidden = !key.get();
  } catch (error) {
    isLocked = error.status === 401;
    if (isLocked && asking && (await askForKey(error))) return list({ asking });
    notice(isLocked ? "This server requires its API key." : sentence(error.message));
    return undefined;
  }
  const ready = served.list.filter((one) => one.state === "READY");
  for (const one of ready) one.pinned = ready.filter(({ name }) => name === one.name).length > 1;
  const same = (one) => one.name === served.chosen?.name;
  const chosen = ready.find((one) => same(one) && one.version === served.chosen.version) ?? ready.find(same) ?? ready[0];
  offer(ready, chosen);
  if (chosen && state !== "not ready") notice("");
  else notice(chosen ? "The server is not ready: it is starting or stopping, or its device is failing." : "No model is loaded.");
  return choose(chosen);
}

/** Fill the list of models; with a single one there is nothing to choose. */
function offer(ready, chosen) {
  const options = served.list.map((one) => {
    const isReady = ready.includes(one);
    const name = one.pinned ? `${one.name}, version ${one.version}` : one.name;
    const option = new Option(isReady ? name : `${name} (${one.reason || "not loaded"})`, "", false, one === chosen);
    option.disabled = !isReady;
    return option;
  });
  at("model").replaceChildren(...options);
  at("model").hidden = at("model-label").hidden = options.length < 2;
  document.body.classList.toggle("several", options.length > 1);
}

async function choose(model) {
  served.chosen = model;
  showCommand();
  if (!model) {
    at("about").textContent = "";
    return;
  }
  try {
    const { parameters } = await metadata({ name: model.name, version: model.pinned && model.version });
    if (model !== served.chosen) return; // another was chosen in the meantime
    served.classes = Math.max(1, parameters.class_names.length);
    const side = parameters.preprocessing?.image_size;
    const facts = [counted(served.classes, "class", "classes"), side && `${side}\u00a0\u00d7\u00a0${side}\u00a0px`];
    const name = served.list.length > 1 ? "" : model.name;
    at("about").textContent = [name, model.version && `version ${model.version}`, ...facts].filter(Boolean).join(" \u00b7 ");
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    at("about").textContent = "";
    served.classes = SHOWN; // the server's default
  }
}

function showCommand() {
  const address = new URL(predictAddress(served.list.length > 1 && served.chosen, SHOWN), location.href).href;
  const header = key.get() ? '-H "X-API-Key: $KEY" ' : "";
  at("curl").textContent = `curl ${header}--data-binary @photo.jpg '${address.replaceAll("'", "%27")}'`;
}

let asked; // the answer to the dialog that is open

/** Ask for the API key; false if the user does not give it. */
function askForKey({ used }) {
  const dialog = at("key-dialog");
  asked ??= new Promise((resolve) => {
    at("key-why").textContent = used ? "The server does not accept this key." : "This server requires its API key.";
    at("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
    dialog.showModal();
  }).then((isGiven) => {
    asked = undefined;
    if (isGiven) {
      key.set(at("key").value);
      at("key").value = "";
      list();
    }
    return isGiven;
  });
  return asked;
}

/** Say what is wrong with the server, or, with an empty text, that nothing is. */
function notice(text) {
  if (at("notice-text").textContent !== text) at("notice-text").textContent = text;
  at("enter-key").hidden = !isLocked;
  at("notice").hidden = !text;
}

async function watch() {
  if (!document.hidden) await look();
  setTimeout(watch, state === "ready" && served.chosen ? LOOK.well : LOOK.unwell);
}

/* Small things. */

function speak(text) {
  at("live").textContent = text;
}

const sleep = (time, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, time);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyByHand(text); // browsers give the clipboard to HTTPS and loopback addresses only
  }
  const label = button.textContent;
  if (label === "Copied") return;
  button.textContent = "Copied";
  speak("Copied.");
  setTimeout(() => (button.textContent = label), 1500);
}

function copyByHand(text) {
  const field = document.createElement("textarea");
  const focused = document.activeElement;
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** All files of a drop, also those in folders. */
async function dropped({ items, files }) {
  const entries = [...items].map((item) => item.webkitGetAsEntry?.());
  if (!entries.some((entry) => entry?.isDirectory)) return [...files];
  return (await Promise.all(entries.filter(Boolean).map(filesOf))).flat();
}

async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const inside = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100
    if (!some.length) break;
    inside.push(...some.filter(({ name }) => !name.startsWith(".")));
  }
  return (await Promise.all(inside.map(filesOf))).flat();
}

/* What the user does. */

for (const [button, input] of [["choose", "files"], ["take", "camera"]]) {
  at(button).addEventListener("click", () => at(input).click());
  at(input).addEventListener("change", () => {
    add(at(input).files);
    at(input).value = ""; // so that the same photo can be chosen again
  });
}

const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
let depth = 0; // elements that are being dragged over, one inside the other
function dragged(change) {
  depth = Math.max(0, change === 0 ? 0 : depth + change);
  at("dropping").hidden = depth === 0;
}
addEventListener("dragenter", (event) => hasFiles(event) && dragged(1));
addEventListener("dragleave", (event) => hasFiles(event) && dragged(-1));
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", async (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault(); // else the browser opens the photo
  dragged(0);
  add(await dropped(event.dataTransfer));
});
addEventListener("paste", ({ clipboardData }) => add(clipboardData.files));
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("key-dialog").open) return;
  dragged(0);
  if (sending.size + waiting.length) cancel();
});

at("cancel").addEventListener("click", cancel);
at("retry").addEventListener("click", () => send(photos.filter(({ card }) => !card.find(".again").hidden)));
at("clear").addEventListener("click", clear);
at("copy-all").addEventListener("click", ({ currentTarget }) => copy(currentTarget, JSON.stringify(photos.map(record), null, 2)));
at("download").addEventListener("click", () => download("predictions.csv", "text/csv", csv(photos, SHOWN)));
at("copy-curl").addEventListener("click", ({ currentTarget }) => copy(currentTarget, at("curl").textContent));
at("model").addEventListener("change", () => choose(served.list[at("model").selectedIndex]));
at("enter-key").addEventListener("click", () => list({ asking: true }));
at("forget").addEventListener("click", () => {
  key.forget();
  at("forget").hidden = true;
  at("choose").focus();
  list();
});
at("key-cancel").addEventListener("click", () => at("key-dialog").close(""));
document.addEventListener("visibilitychange", () => document.hidden || look());

showCommand();
look({ asking: true }).then(() => setTimeout(watch, LOOK.unwell));

/* The card of a photo: its picture, its classes as bars, the time taken, or what went wrong. */

import { milliseconds, percent, rounded, sentence } from "./words.js";

export const SHOWN = 5; // classes, until more are asked for

let cards = 0;

/** Names and labels come from files and models: they are only ever set as text. */
export class Card {
  constructor(file, { again, copy, remove }) {
    this.element = copyOf("card");
    this.id = `card-${++cards}`;
    this.url = URL.createObjectURL(file);
    const name = this.find(".name");
    name.id = this.id;
    name.textContent = name.title = file.name;
    this.find("article").setAttribute("aria-labelledby", this.id);
    const image = this.find("img");
    image.alt = `Photo ${file.name}`;
    image.addEventListener("error", () => this.hidePicture());
    image.src = this.url;
    this.find(".remove").setAttribute("aria-label", `Remove ${file.name}`);
    this.find(".remove").addEventListener("click", remove);
    this.find(".again").addEventListener("click", again);
    this.find(".copy").addEventListener("click", ({ currentTarget }) => copy(currentTarget));
    this.find(".more").addEventListener("click", () => this.toggle());
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  /** Say in words what happens to the photo: `state` is waiting, sending, failed or done. */
  say(state, text, { again = false } = {}) {
    this.element.dataset.state = state;
    this.find(".state").textContent = text;
    this.find(".state").hidden = !text;
    this.find(".again").hidden = !again;
    const isDone = state === "done";
    this.find(".about").hidden = this.find(".classes").hidden = !isDone;
    if (!isDone) this.find(".more").hidden = true;
    this.find("article").setAttribute("aria-busy", String(state === "waiting" || state === "sending"));
  }

  answer({ prediction, model, version, milliseconds: server, roundTrip }) {
    const found = new Set(prediction.labels ?? [prediction.label]);
    this.say("done", prediction.labels?.length === 0 ? "No class reaches 50\u202f%." : "");
    this.find(".classes").replaceChildren(...prediction.top.map((one, at) => this.bar(one, at, found.has(one.label))));
    this.find(".more").hidden = prediction.top.length <= SHOWN;
    this.toggle(false);
    const parts = ["decode", "queue", "compute"].filter((part) => part in server);
    this.find(".server").textContent = milliseconds(server.total);
    this.find(".round-trip").textContent = milliseconds(roundTrip);
    this.find(".parts").textContent = parts.map((part) => `${part}\u00a0${rounded(server[part])}`).join(", ");
    this.find(".by").textContent = version ? `${model}, version ${version}` : model;
  }

  bar({ label, probability }, at, isFound) {
    const row = copyOf("class");
    const [name, value, track] = [".label", ".percent", ".track"].map((part) => row.querySelector(part));
    name.id = `${this.id}-class-${at}`;
    name.textContent = label;
    value.textContent = percent(probability);
    track.setAttribute("aria-labelledby", name.id);
    track.setAttribute("aria-valuenow", String(100 * (probability ?? 0)));
    track.setAttribute("aria-valuetext", percent(probability));
    row.querySelector(".fill").style.width = `${100 * (probability ?? 0)}%`;
    row.classList.toggle("found", isFound);
    return row;
  }

  toggle(isOpen = this.find(".more").getAttribute("aria-expanded") !== "true") {
    const rows = [...this.find(".classes").children];
    rows.forEach((row, at) => (row.hidden = at >= SHOWN && !isOpen));
    this.find(".more").setAttribute("aria-expanded", String(isOpen));
    this.find(".more").textContent = isOpen ? "Show fewer" : `Show ${rows.length - SHOWN} more`;
  }

  fail(reason, options) {
    this.say("failed", sentence(reason), options);
  }

  hidePicture() {
    this.find(".picture").classList.add("empty");
    this.find("img").hidden = true;
    this.find(".no-picture").hidden = false;
  }

  close() {
    URL.revokeObjectURL(this.url);
    this.element.remove();
  }
}

const copyOf = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

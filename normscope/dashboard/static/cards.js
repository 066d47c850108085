// The list of runs: how each one is, how far it is, and its worst layer.

import { byId, element, integer, number, plural } from "./element.js";
import { show, view } from "./view.js";

const STATUS = {
  live: "● live",
  finished: "✓ finished",
  failed: "■ failed",
  interrupted: "■ interrupted",
  killed: "■ killed",
  error: "⚠ unreadable",
  waiting: "… reading",
  result: "▤ result",
};
const MEANING = {
  live: "being written now",
  finished: "closed as it should",
  failed: "ended by an exception",
  interrupted: "ended by Ctrl-C",
  killed: "ended without a word: killed, or crashed",
  error: "this directory cannot be read",
  waiting: "not read yet",
  result: "what a command found; opens as a page",
};

const MOST_COMPARED = 12; // as many as the server puts in one figure
const ANEW = { layer: "", metric: "", from: "", to: "" }; // another run, another problem

export const cards = new Map(); // id → card
export const count = { total: 0, matching: 0 }; // of runs and results: in all, and with a name that is looked for
const drawn = new Map(); // id → { card, node }

export function latestFirst() {
  const rank = (card) => (card.status === "live" ? 0 : card.status === "error" ? 2 : 1);
  return [...cards.values()].sort((a, b) => rank(a) - rank(b) || b.updated - a.updated || a.name.localeCompare(b.name));
}

// the runs that the address names; without any, the one that was written last
export function chosen() {
  const named = view.runs.filter((id) => cards.has(id)).slice(-MOST_COMPARED).map((id) => cards.get(id));
  return named.length > 0 || view.runs.length > 0 ? named : latestFirst().filter(({ status }) => status !== "result").slice(0, 1);
}

let listed = new Set(); // ids in the list

// whether every card is here that the answer is about
export function update({ cards: changed, ids, listed: inList, total, matching }) {
  for (const card of changed) cards.set(card.id, card);
  const present = new Set(ids);
  for (const id of cards.keys()) if (!present.has(id)) cards.delete(id);
  listed = new Set(inList);
  Object.assign(count, { total, matching });
  return ids.every((id) => cards.has(id));
}

export function draw() {
  const shown = latestFirst().filter(({ id }) => listed.has(id));
  const some = count.matching < count.total ? `${integer(count.matching)} of ` : "";
  byId("run-count").textContent = `${some}${integer(count.total)}${shown.length < count.matching ? `; the newest ${shown.length} are listed` : ""}`;
  const nodes = shown.map(nodeOf);
  const list = byId("cards");
  nodes.forEach((node, place) => {
    if (list.children[place] !== node) list.insertBefore(node, list.children[place] ?? null);
  });
  while (list.children.length > nodes.length) list.lastChild.remove();
  for (const id of drawn.keys()) if (!cards.has(id)) drawn.delete(id);
}

function nodeOf(card) {
  const before = drawn.get(card.id);
  if (before?.card !== card) {
    const node = before?.node ?? element("li");
    const focused = node.contains(document.activeElement) && document.activeElement.tagName;
    node.replaceChildren(content(card));
    if (focused) node.querySelector(focused).focus();
    drawn.set(card.id, { card, node });
  }
  const { node } = drawn.get(card.id);
  if (card.status === "result") return node;
  const shown = chosen().includes(card);
  node.querySelector("input").checked = shown;
  node.querySelector("button").setAttribute("aria-pressed", shown);
  return node;
}

function content(card) {
  if (card.status === "result") {
    return element(
      "div",
      { class: "card result" },
      element("a", { class: "name", href: `/result?${new URLSearchParams({ id: card.id })}`, target: "_blank", rel: "noopener" }, card.name),
      element("span", { class: "status", title: MEANING.result }, STATUS.result),
      element("span", { class: "facts" }, card.model),
      element("span", { class: "facts" }, card.headline),
    );
  }
  const facts = [
    card.step === null ? "no rows yet" : `step ${integer(card.step)}`,
    card.loss !== null && `loss ${number(card.loss)}`,
    card.layers > 0 && plural(card.layers, "layer"),
  ].filter(Boolean);
  return element(
    "div",
    { class: `card ${card.status}` },
    element("input", { type: "checkbox", "aria-label": `Compare ${card.name}`, title: "Compare with others", onchange: (event) => compare(card.id, event.target.checked) }),
    element("button", { type: "button", class: "name", onclick: () => show({ runs: [card.id], ...ANEW }, { keep: true }) }, card.name),
    element("span", { class: "status", title: (card.status === "failed" && card.error) || (MEANING[card.status] ?? "") }, STATUS[card.status] ?? card.status),
    card.status === "error"
      ? element("span", { class: "problem" }, card.error)
      : element("span", { class: "facts" }, facts.join(" · ")),
    card.notes.length > 0 && element("span", { class: "problem" }, `incomplete: ${card.notes[0]}`),
    card.worst && element("span", { class: "problem" }, card.worst.layer ? element("b", {}, card.worst.layer) : null, `${card.worst.layer ? ": " : ""}${card.worst.rule}`),
    card.findings > 1 && element("span", { class: "facts" }, plural(card.findings, "finding")),
  );
}

function compare(id, wanted) {
  const others = chosen().map((card) => card.id).filter((other) => other !== id);
  show({ runs: wanted ? [...others, id] : others, layer: "" }, { keep: true });
}

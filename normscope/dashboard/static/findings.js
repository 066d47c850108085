// In words: which layer to look at first, every finding, and what is known of the runs.

import { byId, element, integer, plural } from "./element.js";
import { show } from "./view.js";

const QUANTITY_OF = [
  ["growing-gain-", "gain_tight"],
  ["growing-weight", "spectral_norm"],
  ["variance-collapse", "input_variance"],
  ["effective-learning-rate", "effective_lr"],
  ["exploding-gradient", "gradient_norm"],
  ["vanishing-gradient", "gradient_norm"],
  ["dead-units", "dead_fraction"],
  ["running-statistics", "running_divergence"],
];

export function quantityOf(finding) {
  return QUANTITY_OF.find(([rule]) => finding?.rule.startsWith(rule))?.[1] ?? "spectral_norm";
}

let said = ""; // what the verdicts are about, without what every step changes

export function drawVerdict(cards) {
  const about = JSON.stringify(cards.map(({ id, status, error, worst, fine, findings, step }) => [id, status, error, worst, fine, findings, step === null]));
  if (about === said) {
    byId("verdict").querySelectorAll(".headline").forEach((text, place) => (text.textContent = cards.filter(isFine)[place].headline));
    return;
  }
  said = about;
  byId("verdict").replaceChildren(...cards.map(verdict));
  byId("announcement").textContent = [...byId("verdict").querySelectorAll("h2")].map(({ textContent }) => textContent).join("; ");
}

function isFine(card) {
  return card.status !== "error" && !card.worst && card.step !== null;
}

function verdict(card) {
  const { worst } = card;
  const about = element("span", { class: "where" }, card.name);
  if (card.status === "error") {
    return element("div", { class: "verdict bad" }, element("h2", {}, "Cannot be read"), element("p", {}, card.error), about);
  }
  if (isFine(card)) {
    return element("div", { class: "verdict good" }, element("h2", {}, "No warnings"), element("p", { class: "headline" }, card.headline), fine(card), about);
  }
  if (!worst) {
    const [title, text] = card.status === "waiting" ? ["Reading…", ""] : ["Nothing is recorded yet", "The first row is written after the first optimizer step."];
    return element("div", { class: "verdict" }, element("h2", {}, title), element("p", {}, text), about);
  }
  const others = [worst.affected > 1 && `${plural(worst.affected - 1, "other layer")} too`, card.findings > 1 && `${plural(card.findings - 1, "more finding")} below`];
  return element(
    "div",
    { class: "verdict bad" },
    element("h2", {}, worst.layer ? "Look at " : "Look at the whole network", worst.layer && element("code", {}, worst.layer)),
    element("p", {}, `${capital(worst.message)}${worst.when ? ` (${worst.when})` : ""}.`),
    worst.fix && element("p", {}, element("b", {}, "Try: "), `${worst.fix}.`),
    fine(card),
    element("p", { class: "where" }, [card.name, worst.rule, ...others].filter(Boolean).join(" · ")),
  );
}

function fine(card) {
  return card.fine.length > 0 && element("details", {}, element("summary", {}, "What is fine"), element("ul", {}, card.fine.map((sentence) => element("li", {}, sentence))));
}

export function drawFindings(details) {
  const rows = details.flatMap(({ card, findings }) => findings.map((finding) => ({ card, finding })));
  rows.sort((a, b) => (b.finding.step ?? 0) - (a.finding.step ?? 0));
  const headings = ["step", "layer", "what", "try", ...(details.length > 1 ? ["run"] : [])];
  byId("findings").replaceChildren(
    rows.length === 0
      ? element("p", {}, "None.")
      : element(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": "All findings, newest first" },
          element(
            "table",
            {},
            element("caption", {}, `${plural(rows.length, "finding")}, newest first; a layer's name shows it over time.`),
            element("thead", {}, element("tr", {}, headings.map((name) => element("th", { scope: "col" }, name)))),
            element("tbody", {}, rows.map(({ card, finding }) => row(card, finding, details.length > 1))),
          ),
        ),
  );
}

function row(card, finding, named) {
  return element(
    "tr",
    {},
    element("td", { class: "number" }, finding.step === null ? "–" : integer(finding.step)),
    element("td", {}, finding.layer === null ? "all" : layerButton(finding.layer, quantityOf(finding)), finding.affected > 1 && ` and ${finding.affected - 1} more`),
    element("td", {}, element("b", {}, finding.rule), element("br"), finding.message),
    element("td", {}, finding.fix),
    named && element("td", {}, card.name),
  );
}

export function layerButton(name, metric) {
  return element("button", { type: "button", class: "link", onclick: () => show({ layer: name, metric }, { keep: true }) }, name);
}

export function drawSettings(details) {
  byId("settings").replaceChildren(
    ...details.map(({ card, settings, notes }) =>
      element(
        "details",
        {},
        element("summary", {}, card.name),
        notes.length > 0 && element("ul", {}, notes.map((note) => element("li", {}, note))),
        element("pre", { tabindex: "0" }, JSON.stringify(settings, null, 1)),
      ),
    ),
  );
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

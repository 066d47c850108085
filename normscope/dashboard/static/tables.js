// The numbers behind a figure, for who cannot see it or wants to read them.

import { ask } from "./api.js";
import { element, integer, number } from "./element.js";
import { layerButton } from "./findings.js";

export function tableOf(question) {
  const place = element("div", { class: "scroll", tabindex: "0", role: "region" });
  const details = element("details", { class: "table" }, element("summary", {}, "As a table"), place);
  const fill = async () => {
    if (!details.open) return;
    try {
      place.replaceChildren(drawn(await ask("table", question()), question().of));
    } catch (error) {
      place.replaceChildren(element("p", { class: "problem" }, error.message));
    }
  };
  details.addEventListener("toggle", fill);
  return { details, fill, name: (title) => place.setAttribute("aria-label", `Table of ${title}`) };
}

function drawn({ caption, columns, rows }, metric) {
  const steps = new Set(columns.flatMap((name, index) => (name.endsWith("step") ? [index] : [])));
  const words = new Set(columns.flatMap((name, index) => (["layer", "kind"].includes(name) ? [index] : [])));
  const cell = (value, index) => {
    if (steps.has(index)) return element("td", { class: "number" }, integer(value));
    if (!words.has(index)) return element("td", { class: "number" }, number(value));
    return columns[index] === "layer" ? element("th", { scope: "row" }, layerButton(value, metric)) : element("td", {}, value);
  };
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, columns.map((name, index) => element("th", { scope: "col", class: words.has(index) ? "" : "number" }, name)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map(cell)))),
  );
}

// DOM nodes from names and text. Text is always text: no string that comes from a run is ever parsed as markup.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const byId = (id) => document.getElementById(id);

const exact = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function integer(value) {
  return exact.format(value);
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // "nan", "inf"
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2).replace("e+", "e") : String(Number(value.toPrecision(4)));
}

export function plural(count, word) {
  return `${integer(count)} ${word}${count === 1 ? "" : "s"}`;
}

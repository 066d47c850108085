// What is shown, kept in the address so that it can be shared: runs, quantity, filter, steps, layer, theme.

const SINGLE = ["metric", "filter", "from", "to", "layer", "theme"];
const listeners = [];

function read() {
  const query = new URLSearchParams(location.search);
  const view = { runs: query.getAll("run") };
  for (const name of SINGLE) view[name] = query.get(name) ?? "";
  for (const name of ["from", "to"]) if (!Number.isFinite(parseFloat(view[name]))) view[name] = "";
  return view;
}

export let view = read();

function address(of) {
  const query = new URLSearchParams();
  for (const run of of.runs) query.append("run", run);
  for (const name of SINGLE) if (of[name] !== "") query.set(name, of[name]);
  const text = query.toString();
  return text ? `?${text}` : location.pathname;
}

// keep: whether the way back leads here; a choice is worth a step in the history, a zoom or a letter typed is not
export function show(changes, { keep = false } = {}) {
  const before = view;
  view = { ...view, ...changes };
  if (address(view) === address(before)) return;
  history[keep ? "pushState" : "replaceState"](null, "", address(view));
  for (const listener of listeners) listener(before);
}

export function onView(listener) {
  listeners.push(listener);
}

addEventListener("popstate", () => {
  const before = view;
  view = read();
  for (const listener of listeners) listener(before);
});

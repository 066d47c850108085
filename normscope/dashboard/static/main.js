// The page: asks for what changed every second, and shows what the address says.

import { ask } from "./api.js";
import { cards, chosen as chosenCards, count, draw as drawCards, update } from "./cards.js";
import { byId, element, plural } from "./element.js";
import { arrange, between, scrollTo } from "./figures.js";
import { matching, ranges } from "./filter.js";
import { drawFindings, drawSettings, drawVerdict, quantityOf } from "./findings.js";
import { start as startTheme } from "./theme.js";
import { onView, show, view } from "./view.js";

const EVERY = 1000; // milliseconds between questions

let version = -1;
let reading = true; // whether the server has not looked through the directory yet
let found = ""; // the name that the list on the page was asked for with
let titles = { metrics: {}, scalars: {} };
let written = null; // the findings and settings on the page
let drawing = 0; // only the newest of several drawings under way may finish

// the runs and what is shown of them -----------------------------------------------------------------------------------

function metricOf(chosen) {
  return view.metric in titles.metrics ? view.metric : quantityOf(chosen.find((card) => card.worst)?.worst);
}

async function detailsOf(readable) {
  if (readable.length === 0) return [];
  const { runs } = await ask("run", { run: readable.map(({ id }) => id) });
  const details = runs.map((each, index) => ({ card: readable[index], ...each }));
  if (runs !== written) {
    written = runs; // redrawn only when they changed: what a reader opened stays open
    drawFindings(details);
    drawSettings(details);
  }
  return details;
}

// asked: whether somebody has just asked for a layer
async function drawView(asked = false) {
  const turn = ++drawing;
  const chosen = chosenCards();
  const none = count.total === 0;
  byId("view").hidden = none || chosen.length === 0;
  if (chosen.length === 0 && reading) return byId("verdict").replaceChildren(element("p", {}, "Reading the runs…"));
  if (none) return drawWelcome();
  if (chosen.length === 0) {
    const why = view.runs.length > 0 ? "Choose a run from the list: the ones in this address are not here." : "There are results here, and no runs yet.";
    byId("verdict").replaceChildren(element("p", {}, why));
    return;
  }
  drawVerdict(chosen);
  const readable = chosen.filter((card) => card.step !== null); // an unreadable run has no step, nor has one without rows
  byId("view").hidden = readable.length === 0;
  byId("metric").value = metricOf(chosen);
  try {
    const details = await detailsOf(readable);
    const layers = await filtered(details);
    if (turn !== drawing || details.length === 0) return;
    arrange(byId("figures"), panelsOf(details, layers, metricOf(chosen)));
    if (asked) scrollTo("layer");
  } catch (error) {
    if (turn === drawing) byId("filter-state").textContent = error.message;
  }
}

async function filtered(details) {
  const state = byId("filter-state");
  const field = byId("filter");
  const lists = details.map(({ layers }) => layers.map(({ name }) => name));
  try {
    const found = await matching(view.filter, lists);
    const all = new Set(lists.flat()).size;
    const some = new Set(found.flatMap((positions, run) => positions.map((position) => lists[run][position]))).size;
    state.textContent = view.filter === "" ? `(${all})` : `(${some} of ${all})`;
    field.removeAttribute("aria-invalid");
    return found;
  } catch (error) {
    state.textContent = `not used: ${error.message}`;
    field.setAttribute("aria-invalid", "true");
    return lists.map((names) => names.map((_, index) => index));
  }
}

function panelsOf(details, layers, metric) {
  const ids = details.map(({ card }) => card.id);
  const steps = between(...extent(details.map(({ card }) => card)));
  const range = steps.from === undefined ? extent(details.map(({ card }) => card)) : [steps.from, steps.to];
  const several = details.length > 1;
  const title = titles.metrics[metric];
  const panels = details.map(({ card, layers: every }, index) => ({
    key: `heatmap ${card.id}`,
    title: several ? `${title} · ${card.name}` : title,
    question: () => ({ kind: "heatmap", of: metric, run: [card.id, ...ids.filter((id) => id !== card.id)], layers: ranges(layers[index]), ...steps }),
    onClick: ({ y }) => every.some(({ name }) => name === y) && show({ layer: y }, { keep: true }),
  }));
  details.forEach(({ card, layers: every }) => {
    const named = view.layer || (quantityOf(card.worst) === metric && card.worst?.layer);
    const position = every.findIndex(({ name }) => name === named);
    if (position < 0) return;
    panels.push({
      key: `layer ${card.id}`,
      title: `${every[position].name}: ${title}${several ? ` · ${card.name}` : ""}`,
      question: () => ({ kind: "layers", of: metric, run: [card.id], layers: `${position}`, ...steps }),
    });
  });
  panels.push({ key: "loss", title: titles.scalars.loss, question: () => ({ kind: "series", of: "loss", run: ids, ...steps }) });
  if (several) panels.push({ key: "weights", title: titles.scalars.log10_weight_product, question: () => ({ kind: "series", of: "log10_weight_product", run: ids, ...steps }) });
  else panels.push({ key: "products", title: "Products over depth", question: () => ({ kind: "products", run: ids, ...steps }) });
  if (!several) panels.push({ key: "norm_angle", title: "Norm and rotation of scale-free weights", range: null, question: () => ({ kind: "norm_angle", of: "angle", run: ids, ...steps }) });
  return panels.map((panel) => ({ range, ...panel }));
}

function extent(shown) {
  const [first, last] = [Math.min(...shown.map((card) => card.first ?? 0)), Math.max(...shown.map((card) => card.step ?? 0))];
  return first < last ? [first, last] : [first - 1, first + 1];
}

function drawWelcome() {
  byId("verdict").replaceChildren(
    element(
      "div",
      { class: "verdict" },
      element("h2", {}, "No runs here yet"),
      element("p", {}, "Record a training, and it appears here by itself:"),
      element("pre", { tabindex: "0" }, 'import normscope as ns\n\nwith ns.watch(model, optimizer, run="runs/first") as w:\n    …your loop, unchanged…'),
      element("p", {}, "Or run ", element("code", {}, "normscope demo"), ", which records three trainings in runs/demo."),
    ),
  );
}

// following ------------------------------------------------------------------------------------------------------------

async function look() {
  const find = byId("find").value.trim();
  const answer = await ask("runs", { since: find === found ? version : -1, find: find || undefined, run: view.runs });
  byId("directory").textContent = answer.directory;
  const changed = new Set(answer.cards.map(({ id }) => id));
  const before = cards.size;
  const began = reading;
  reading = answer.more;
  if (answer.version !== version || find !== found || answer.total !== count.total) {
    const whole = update(answer);
    drawCards();
    [version, found] = [whole ? answer.version : -1, find];
    if (before !== cards.size || before === 0 || chosenCards().some(({ id }) => changed.has(id))) drawView();
  } else if (before === 0 || began !== reading) drawView();
  const live = [...cards.values()].filter(({ status }) => status === "live").length;
  byId("connection").textContent = live > 0 ? `● following ${plural(live, "live run")}` : "";
  byId("connection").className = "";
  return answer.more;
}

async function follow() {
  let wait = EVERY;
  if (!document.hidden) {
    try {
      if (await look()) wait = 50;
    } catch {
      byId("connection").textContent = "the server does not answer";
      byId("connection").className = "problem";
    }
  }
  setTimeout(follow, wait);
}

// controls -------------------------------------------------------------------------------------------------------------

function typed(field, name) {
  let waiting = null;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => show({ [name]: field.value }), 250);
  });
}

function fillControls() {
  for (const name of ["filter", "from", "to"]) {
    const field = byId(name);
    if (document.activeElement !== field) field.value = view[name];
  }
  byId("reset").disabled = view.from === "" && view.to === "";
}

async function start() {
  startTheme();
  byId("tools").addEventListener("submit", (event) => event.preventDefault());
  let waiting = null;
  byId("find").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => look().catch(() => {}), 150);
  });
  byId("metric").addEventListener("change", (event) => show({ metric: event.target.value }, { keep: true }));
  byId("reset").addEventListener("click", () => show({ from: "", to: "" }));
  for (const name of ["filter", "from", "to"]) typed(byId(name), name);
  onView((before) => {
    fillControls();
    if (before.runs !== view.runs) drawCards();
    if (before.theme === view.theme) drawView(view.layer !== "" && before.layer !== view.layer);
  });
  if (matchMedia("(max-width: 860px)").matches) byId("run-list").open = false;
  fillControls();
  titles = await ask("quantities");
  byId("metric").replaceChildren(...Object.entries(titles.metrics).map(([name, title]) => element("option", { value: name }, title)));
  document.addEventListener("visibilitychange", () => document.hidden || look().catch(() => {}));
  await follow();
}

start();

// Figures that zoom together and share a cursor. Each asks the server for as many points as it has pixels for.

import { ask } from "./api.js";
import { element, integer } from "./element.js";
import { tableOf } from "./tables.js";
import { isDark, onTheme } from "./theme.js";
import { show, view } from "./view.js";

const CONFIG = { displayModeBar: false, doubleClick: false };
const LINES_HEIGHT = 300; // pixels
const SHARE = 4; // a figure is asked for again after this many times the time that it took: the page stays awake

let loading = null;

function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = element("script", { src: "/static/plotly.min.js", onload: () => resolve(globalThis.Plotly), onerror: reject });
    document.head.append(script);
  });
  return loading;
}

const panels = new Map(); // key → Panel

// wanted: [{ key, title, question, range, onClick }], range: the steps shown, null where the axis has none; draws them in this order, keeps those that stay
export function arrange(place, wanted) {
  const keys = new Set(wanted.map(({ key }) => key));
  for (const [key, panel] of panels) {
    if (!keys.has(key)) {
      panel.remove();
      panels.delete(key);
    }
  }
  wanted.forEach((description, index) => {
    if (!panels.has(description.key)) panels.set(description.key, new Panel(description));
    const panel = panels.get(description.key);
    panel.describe(description);
    if (place.children[index] !== panel.node) place.insertBefore(panel.node, place.children[index] ?? null);
    panel.refresh();
  });
}

export function scrollTo(prefix) {
  const panel = [...panels.entries()].find(([key]) => key.startsWith(prefix))?.[1];
  panel?.node.scrollIntoView({ block: "nearest" });
}

class Panel {
  constructor({ key }) {
    this.shown = null;
    this.busy = false;
    this.again = false;
    this.visible = false;
    this.plot = element("div", { class: "plot", role: "img" });
    this.cursor = element("div", { class: "cursor", hidden: true }, element("span"));
    this.message = element("p", { class: "problem", role: "status" });
    this.heading = element("h2");
    this.table = tableOf(() => this.question());
    this.node = element("section", { class: "panel figure", "data-key": key }, this.heading, this.message, element("div", { class: "stage" }, this.plot, this.cursor), this.table.details);
    this.plot.addEventListener("mousemove", (event) => this.point(event));
    this.plot.addEventListener("mouseleave", () => moveCursors(null));
    this.watcher = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.refresh();
    }, { rootMargin: "200px" });
    this.watcher.observe(this.node);
    this.sizes = new ResizeObserver(() => this.fit()); // a window is not all that changes a panel's width
    this.sizes.observe(this.node);
  }

  describe({ title, question, range, onClick = null }) {
    Object.assign(this, { question, range, onClick });
    this.heading.textContent = title;
    this.table.name(title);
    this.plot.setAttribute("aria-label", `${title}: figure; its numbers are in the table below it`);
  }

  async refresh() {
    if (!this.visible) return;
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    const start = performance.now();
    try {
      const columns = Math.max(50, Math.min(500, Math.round(this.node.clientWidth / 3)));
      const [library, figure] = await Promise.all([plotly(), ask("figure", { ...this.question(), columns })]);
      if (figure !== this.shown || String(this.range) !== this.drawn) {
        await this.draw(library, figure);
        this.table.fill();
      }
      this.message.textContent = "";
    } catch (error) {
      this.message.textContent = error.message;
    }
    setTimeout(() => {
      this.busy = false;
      if (this.again) {
        this.again = false;
        this.refresh();
      }
    }, (SHARE - 1) * Math.min(performance.now() - start, 1500) * (this.shown ? 1 : 0));
  }

  async draw(library, figure) {
    const first = this.shown === null;
    this.shown = figure;
    this.drawn = String(this.range);
    const { title: _, ...layout } = figure.layout;
    const colour = isDark() ? "#e6edf3" : "#1f2328";
    Object.assign(layout, {
      font: { ...layout.font, color: colour },
      hoverlabel: { ...layout.hoverlabel, bgcolor: isDark() ? "#21262d" : "#ffffff", font: { color: colour } },
      margin: { ...layout.margin, t: layout.showlegend ? 40 : 12 },
      yaxis: { ...layout.yaxis, fixedrange: true, ...(layout.yaxis.type === "category" ? rows(figure) : {}) },
      height: layout.yaxis.type === "category" ? layout.height : LINES_HEIGHT,
      xaxis: this.range ? { ...layout.xaxis, range: [...this.range], autorange: false } : { ...layout.xaxis, fixedrange: true },
      dragmode: this.range ? "zoom" : false,
    });
    await library.react(this.plot, figure.data, layout, CONFIG);
    this.fit();
    if (first) {
      this.plot.on("plotly_relayout", zoomed);
      this.plot.on("plotly_doubleclick", () => show({ from: "", to: "" }));
      this.plot.on("plotly_click", ({ points: [point] }) => this.onClick?.(point));
    }
  }

  async fit() {
    const library = this.shown && (await plotly());
    if (library && this.plot.clientWidth !== this.plot._fullLayout?.width && this.plot.clientWidth > 0) library.Plots.resize(this.plot);
  }

  point(event) {
    const axis = this.plot._fullLayout?.xaxis;
    if (!axis || !this.range) return;
    const inside = event.clientX - this.plot.getBoundingClientRect().left - axis._offset;
    moveCursors(inside >= 0 && inside <= axis._length ? axis.p2d(inside) : null);
  }

  moveCursor(step) {
    const axis = this.plot._fullLayout?.xaxis;
    const inside = step === null || !axis || !this.range ? -1 : axis.d2p(step);
    this.cursor.hidden = !(inside >= 0 && inside <= axis?._length);
    if (this.cursor.hidden) return;
    this.cursor.style.transform = `translateX(${axis._offset + inside}px)`;
    this.cursor.firstChild.textContent = integer(step);
    this.cursor.classList.toggle("left", inside > axis._length / 2);
  }

  recolour() {
    const figure = this.shown;
    if (figure) plotly().then((library) => this.draw(library, figure));
  }

  remove() {
    this.watcher.disconnect();
    this.sizes.disconnect();
    if (this.shown) plotly().then((library) => library.purge(this.plot));
    this.node.remove();
  }
}

// all layers of a heatmap and nothing around them; their names need no title
function rows({ data: [cells] }) {
  return cells ? { title: undefined, autorange: false, range: [cells.y.length - 0.5, -0.5] } : { title: undefined };
}

function moveCursors(step) {
  for (const panel of panels.values()) panel.moveCursor(step);
}

function zoomed(change) {
  const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (from !== undefined && to !== undefined) show({ from: String(Math.floor(from)), to: String(Math.ceil(to)) });
}

// the steps that are shown, as the server wants them
export function between(first, last) {
  if (view.from === "" && view.to === "") return {};
  const from = view.from === "" ? first : Number(view.from);
  const to = view.to === "" ? last : Number(view.to);
  return from < to ? { from, to } : {};
}

onTheme(() => panels.forEach((panel) => panel.recolour()));

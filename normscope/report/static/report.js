// Unpacks Plotly and the figures from this very file and draws them; without that, captions and tables say the same.
"use strict";
(async () => {
  const root = document.documentElement;
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  const printing = window.matchMedia("print");
  const scheme = () => (printing.matches ? "light" : root.dataset.scheme || (preferred.matches ? "dark" : "light"));
  const plots = [...document.querySelectorAll(".plot")];
  const narrow = 600;
  const paper = 660; // pixels across a printed page

  async function unpacked(id) {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  function change(layout) {
    for (const plot of plots) {
      if (plot.data) window.Plotly.relayout(plot, layout);
    }
  }

  function fitted(layout, width) {
    // on a small screen names of layers give way to the picture; hovering and the table have them in full
    const axis = layout.yaxis || {};
    if (width < narrow && axis.type === "category") {
      layout.yaxis = { ...axis, tickfont: { size: 9 }, title: { text: "" }, labelalias: layout.meta.short };
      layout.margin = { l: 10, r: 5, t: 10, b: 40 };
    }
    return layout;
  }

  async function draw() {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old");
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    const { figures, schemes, config } = JSON.parse(await unpacked("figures"));
    for (const plot of plots) {
      const { data, layout } = figures[plot.id];
      plot.replaceChildren();
      await window.Plotly.newPlot(plot, data, fitted(layout, plot.clientWidth), config);
      await new Promise((resume) => setTimeout(resume, 0));
    }
    change(schemes[scheme()]);
    const button = document.getElementById("scheme");
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.scheme = scheme() === "dark" ? "light" : "dark";
      change(schemes[scheme()]);
    });
    window.addEventListener("beforeprint", () => change({ width: paper, autosize: false }));
    window.addEventListener("afterprint", () => change({ width: null, autosize: true }));
    for (const query of [preferred, printing]) query.addEventListener("change", () => change(schemes[scheme()]));
    root.dataset.drawn = "true";
  }

  try {
    await draw();
  } catch (error) {
    for (const plot of plots) {
      if (!plot.data) plot.textContent = `The figure could not be drawn (${error.message}); its numbers are in the table below.`;
    }
  }
})();

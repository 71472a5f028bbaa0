"use strict";
// The page as a whole: a section for each result, with its charts, notes and tables.
amanda.ready(() => {
  const {make, rows} = amanda, byId = (id) => document.getElementById(id);
  const results = amanda.data("results"), facts = amanda.data("facts");
  const drawn = [];

  amanda.details.of(results);
  byId("title").textContent = facts.title;
  byId("facts").replaceChildren(...facts.lines.map((text) => make("span", "", text)),
    ...(facts.problem ? [make("span", "problem", facts.problem)] : []));

  const context = (tool, result) => ({tool, result, results, select: amanda.details.open});

  // A chart is drawn when it comes into view, since a page may have many.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) entry.target.draw();
  }, {rootMargin: "400px"});
  const isHalf = (chart) => chart !== undefined && (chart.kind === "bars" || chart.half === true);
  const card = (tool, result, chart, half) => {
    const host = make("div", "chart"), figure = make("figure", half ? "half" : "", host);
    if (chart.title) figure.prepend(make("figcaption", "", make("h3", "", chart.title),
      chart.note ? make("p", "dim", chart.note) : null));
    let done = false;
    figure.draw = () => {
      if (done) return;
      done = true;
      watcher.unobserve(figure);
      try {
        const draw = amanda.charts[chart.kind];
        if (!draw) throw new Error(`This page has no charts of the kind ${JSON.stringify(chart.kind)}`);
        const one = draw(host, chart, context(tool, result)) || {};
        drawn.push(one);
      } catch (error) {
        host.replaceChildren(make("p", "problem", `Not drawn: ${error.message}`));
      }
    };
    watcher.observe(figure);
    return figure;
  };

  const isPart = (value) => value !== null && typeof value === "object" && Object.keys(value).length > 0;
  const HIDDEN = new Set(["charts", "units", "notes", "format", "graphs", "sequence", "over_time"]);

  const section = (tool, result) => {
    const title = make("h2", "", rows.title(tool)), whole = make("section", "", title);
    whole.id = `result-${tool}`;
    // A chart that needs other results is there if they are.
    const formats = new Set(Object.values(results).map((one) => one.format));
    const charts = (Array.isArray(result.charts) ? result.charts : [])
      .filter((chart) => (chart.needs || []).every((format) => formats.has(format)))
      .filter((chart) => chart.kind !== "figures" || chart.items.length);
    // Of charts of half the width, two that follow one another are beside one another.
    const halves = new Set();
    charts.forEach((chart, n) => {
      if (isHalf(chart) && isHalf(charts[n + 1]) && !halves.has(chart)) halves.add(chart).add(charts[n + 1]);
    });
    whole.append(make("div", "charts", ...charts.map((chart) => card(tool, result, chart, halves.has(chart)))));
    const notes = Array.isArray(result.notes) ? result.notes : [];
    if (notes.length)
      whole.append(make("ul", "notes", ...notes.map((text) => make("li", "", String(text)))));
    const parts = Object.keys(result).filter((key) => !HIDDEN.has(key) && isPart(result[key]));
    const single = Object.entries(result).filter(([key, value]) =>
      !HIDDEN.has(key) && !isPart(value) && value !== null && !(Array.isArray(value)) && value !== "");
    if (parts.length || single.length) {
      // A result without charts is its tables.
      const open = charts.length === 0;
      const tables = make("div", "tables");
      const fold = (label, draw, opened) => {
        const summary = make("summary", "", label), one = make("details", "", summary);
        let filled = false;
        const fill = () => { if (one.open && !filled) { filled = true; draw(one); } };
        one.addEventListener("toggle", fill);
        one.open = opened;
        tables.append(one);
      };
      const listed = (entries, part) => make("dl", "", ...entries.flatMap(([key, value]) =>
        [make("dt", "", rows.label(key)), make("dd", "", amanda.table.shown(value, rows.unit(result, key, part)))]));
      parts.forEach((part, n) => {
        const entries = Object.entries(result[part]), isList = Array.isArray(result[part]);
        const flat = !isList && entries.every(([, value]) => !isPart(value));
        fold(flat ? rows.label(part) : `${rows.label(part)} (${entries.length})`,
             (host) => flat ? host.append(listed(entries, part))
               : amanda.table.draw(host, result, part, amanda.details.open), open && n === 0);
      });
      if (single.length)
        fold("settings and totals", (host) => host.append(listed(single, "")), open && !parts.length);
      whole.append(make("h3", "tables-title", "Tables"), tables);
    }
    return whole;
  };

  const every = Object.entries(results);
  byId("main").replaceChildren(...every.map(([tool, result]) => section(tool, result)));
  if (!every.length) byId("main").append(make("p", "dim", "There are no results."));
  byId("contents").replaceChildren(...every.map(([tool, result]) => {
    const link = make("a", "", rows.title(tool));
    link.href = `#result-${tool}`;
    return link;
  }));

  // Search, colours, size, printing.
  const find = byId("find");
  byId("names").replaceChildren(...amanda.details.names().slice(0, 5000).map((name) => new Option(name)));
  find.addEventListener("change", () => {
    const words = find.value.toLowerCase();
    const name = amanda.details.names().find((one) => one.toLowerCase() === words) ||
      amanda.details.names().find((one) => one.toLowerCase().includes(words));
    if (words && name) amanda.details.open({name});
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.defaultPrevented && !/INPUT|SELECT/.test(event.target.tagName)) { event.preventDefault(); find.focus(); }
  });
  const schemes = ["system", "light", "dark"];
  let scheme = 0;
  const dress = () => {
    byId("scheme").textContent = `Colours: ${schemes[scheme]}`;
    if (scheme) document.documentElement.dataset.scheme = schemes[scheme];
    else delete document.documentElement.dataset.scheme;
    amanda.repaint();
  };
  byId("scheme").addEventListener("click", () => { scheme = (scheme + 1) % schemes.length; dress(); });
  amanda.onColors(() => { for (const one of drawn) if (one.repaint) one.repaint(); });
  amanda.details.tell((op) => { for (const one of drawn) if (one.select) one.select(op); });
  let width = innerWidth, waiting = 0;
  const resize = () => { for (const one of drawn) if (one.resize) one.resize(); };
  new ResizeObserver(() => {
    if (byId("main").clientWidth === width) return;
    width = byId("main").clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(resize);
  }).observe(byId("main"));
  addEventListener("beforeprint", () => {
    for (const figure of document.querySelectorAll("figure")) figure.draw();
    resize();
  });
  dress();
});

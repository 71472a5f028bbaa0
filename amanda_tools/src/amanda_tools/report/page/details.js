"use strict";
// The panel with all that the results say of one operator.
amanda.details = (() => {
  const {rows, make} = amanda, panel = document.getElementById("details");
  const COMMON = ["type", "word", "module", "source", "phase", "zone", "namespace"];
  const SKIPPED = new Set([...COMMON, "id", "name", "index", "forward", "forward_type", "node", "is_backward"]);
  let results = {}, index = null, before = null, told = [];

  // Name -> where it is: tool, part and row. Graphs have their operators one level further down.
  const find = () => {
    index = new Map();
    const add = (tool, part, row) => {
      const name = rows.opOf(row);
      if (name === null) return;
      if (!index.has(name)) index.set(name, []);
      index.get(name).push({tool, part, row});
    };
    for (const [tool, result] of Object.entries(results)) {
      for (const [part, found] of Object.entries(result)) {
        if (!Array.isArray(found) || part === "charts") continue;
        for (const row of found) {
          add(tool, part, row);
          for (const node of (row && row.nodes) || []) add(tool, part, node);
        }
      }
    }
  };
  const names = () => { if (!index) find(); return [...index.keys()]; };

  const list = (pairs) => make("dl", "", ...pairs.flatMap(([name, value]) =>
    [make("dt", "", name), make("dd", "", value)]));
  const link = (name) => {
    const button = make("button", "link", name);
    button.type = "button";
    button.addEventListener("click", () => open({name}));
    return button;
  };
  const tensor = (one) => one === null || one === undefined ? "" : Array.isArray(one)
    ? `(${one.map(tensor).join(", ")})` : typeof one === "string" ? one
      : one.dtype ? `${one.dtype}[${(one.shape || ["…"]).map((n) => n ?? "?")}]` : JSON.stringify(one);
  const shown = (tool, part, key, value) => Array.isArray(value) && value.some((one) => one && one.dtype)
    ? value.map(tensor).filter((text) => text).join(" ")
    : Array.isArray(value) && value.every((one) => one === null || typeof one === "string")
      ? value.filter((one) => one !== null).join(" ")
    : key === "notes" && value !== null && typeof value === "object" ? ""
      : amanda.table.shown(value, rows.unit(results[tool], key, part));
  const facts = (tool, part, row) => Object.entries(row)
    .filter(([key, value]) => !SKIPPED.has(key) && ![null, "", 0, false].includes(value) &&
      !(Array.isArray(value) && !value.length))
    .map(([key, value]) => [rows.label(key), shown(tool, part, key, value)]).filter(([, text]) => text !== "");

  const section = (tool, part, found) => {
    const title = make("h3", "", `${rows.title(tool)}${part === "ops" || part === "graphs" ? "" : `: ${rows.label(part)}`}`);
    if (found.length === 1) return [title, list(facts(tool, part, found[0]))];
    return [title, ...found.slice(0, 12).map((row) => {
      const [first, ...others] = facts(tool, part, row);
      return make("details", "", make("summary", "", first ? `${row.kind || first[0]} ${row.tensor || first[1]}` : ""),
                  list(others));
    }), found.length > 12 ? make("p", "dim", `${found.length - 12} more`) : ""];
  };

  const open = (op) => {
    const entries = (index || (find(), index)).get(op.name) || [];
    if (panel.hidden) before = document.activeElement;
    const close = make("button", "close", "×");
    close.type = "button";
    close.setAttribute("aria-label", "Close");
    close.addEventListener("click", shut);
    const common = {};
    for (const {row} of entries) for (const key of COMMON)
      if (row[key] !== null && row[key] !== undefined && row[key] !== "" && !(key in common)) common[key] = String(row[key]);
    if (common.word === common.type) delete common.word;
    const parts = [close, make("h2", "", ...op.name.split(/(?<=[./:])/).flatMap((text) => [text, make("wbr")]))];
    parts.push(entries.length ? list(Object.entries(common).map(([key, value]) => [rows.label(key), value]))
      : make("p", "dim", "No result says more of it."));
    const forward = entries.map(({row}) => row.forward).find((name) => typeof name === "string");
    if (forward) parts.push(make("h3", "", "Gradient of"), link(forward));
    const groups = new Map();
    for (const {tool, part, row} of entries) {
      const key = JSON.stringify([tool, part]);
      if (!groups.has(key)) groups.set(key, {tool, part, found: []});
      groups.get(key).found.push(row);
    }
    for (const {tool, part, found} of groups.values()) parts.push(...section(tool, part, found));
    const backward = names().filter((name) => index.get(name).some(({row}) => row.forward === op.name));
    if (backward.length)
      parts.push(make("h3", "", "Backward operators"), ...backward.map((name) => make("div", "", link(name))));
    panel.replaceChildren(...parts);
    panel.hidden = false;
    document.body.classList.add("detailed");
    panel.scrollTop = 0;
    panel.focus({preventScroll: true});
    for (const row of document.querySelectorAll("tr[data-op]"))
      row.classList.toggle("chosen", row.dataset.op === op.name);
    for (const call of told) call(op);
  };
  const shut = () => {
    panel.hidden = true;
    document.body.classList.remove("detailed");
    if (before) before.focus({preventScroll: true});
  };
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") shut(); });

  return {open, names, of: (found) => { results = found; index = null; }, tell: (call) => told.push(call)};
})();

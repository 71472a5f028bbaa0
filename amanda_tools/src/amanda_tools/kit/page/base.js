"use strict";
// What all scripts of a page share. Everything that comes from a program is put in as text, never
// as markup.
const amanda = (() => {
  // Large data is compressed: scripts read it in what they give to `ready`, which calls it at once
  // if there is none, or else when all of it is there.
  const unpacked = new Map();
  const data = (name) => unpacked.has(name) ? unpacked.get(name)
    : JSON.parse(document.getElementById(`data-${name}`).textContent);
  const unpack = async (element) => {
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(element.id.replace("data-", ""), await new Response(stream).json());
    element.remove();
  };
  const ready = (call) => {
    const packed = [...document.querySelectorAll("script[data-encoding=gzip]")];
    if (!packed.length) { call(); return null; }
    return Promise.all(packed.map(unpack)).then(call).catch((error) => {
      document.body.prepend(`The data of this page cannot be read: ${error}`);
      throw error;
    });
  };

  const make = (tag, name, ...children) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  };

  // A number with four digits, the prefix and the unit, as `amanda show` writes it: 1.25 ms.
  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const SMALL = [[1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];
  const quantity = (number, unit = "") => {
    if (number === null || number === undefined) return "";
    if (typeof number !== "number" || !Number.isFinite(number)) return String(number);
    if (unit === "ns") [number, unit] = [number / 1e9, "s"];
    const prefixes = unit === "s" ? SMALL : PREFIXES;
    const size = Math.abs(number);
    const [factor, prefix] = prefixes.find(([limit]) => size >= limit) || [1, ""];
    const digits = String(Number((number / factor).toPrecision(4)));
    return `${digits} ${prefix}${unit}`.trim();
  };

  // The colours that hold now, which scripts need as values: `color("--accent")`.
  const probe = make("span");
  probe.hidden = true;
  document.body.append(probe);
  const color = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const categories = () => [1, 2, 3, 4, 5, 6, 7, 8].map((n) => color(`--category-${n}`));
  const scale = () => [1, 2, 3, 4, 5, 6, 7].map((n) => color(`--scale-${n}`));

  // Calls when colours change: by the system, by the button of a page, or for printing.
  const repainting = [];
  const onColors = (call) => { repainting.push(call); };
  const repaint = () => { for (const call of repainting) call(); };
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", repaint);

  // Kinds of charts: kind -> (host, chart, context) => {resize(), repaint(), select(op)}, each of
  // them optional. `host` is the empty element to draw into. `chart` is what a result says of the
  // chart: {kind, title, ...}. `context` has `result`, the content of the result's file; `tool`,
  // its name; and `select(op)`, which opens the details of an operator: {id, name, module}, of
  // which a name is enough.
  const charts = {};

  return {data, ready, make, quantity, color, categories, scale, onColors, repaint, charts};
})();

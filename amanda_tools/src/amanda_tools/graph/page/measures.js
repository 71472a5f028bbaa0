"use strict";
// Figures of boxes: sums of what is known of their operators.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const LEVELS = 7;

// Return name -> {name, unit, of(node), per(node)}: figures that the nodes have. `per` is what a
// share is of, or null.
const measuresOf = (graph) => {
  const found = new Map();
  const add = (name, unit, of, per = null) => {
    if (graph.nodes.some((node) => lib.isOp(node) && of(node)))
      found.set(name, {name, unit, of, per});
  };
  const noted = new Set();
  for (const node of graph.nodes) if (lib.isOp(node))
    for (const [name, value] of Object.entries(node.notes))
      if (typeof value === "number") noted.add(name);
  for (const name of noted)
    add(lib.plain(name), lib.unitOf(name), (op) => Number(op.notes[name]) || 0);
  const zeros = [...noted].find((name) => /zeros of the output$/.test(name));
  if (zeros)
    add("share of zeros in outputs", "%", (op) => Number(op.notes[zeros]) || 0,
        (op) => zeros in op.notes ? lib.elements(op.outputs) : 0);
  add("size of outputs", "B", (op) => lib.bytes(op.outputs));
  const parameters = parametersOf(graph);
  add("parameters", "", (op) => parameters.get(op.index)?.elements || 0);
  add("size of parameters", "B", (op) => parameters.get(op.index)?.bytes || 0);
  add("executions", "", (op) => op.executions || 0);
  return found;
};

// Return index of an operator -> {elements, bytes} of the parameters that it is the first to read.
const parametersOf = (graph) => {
  const found = new Map();
  for (const node of graph.nodes)
    if (!lib.isOp(node) && node.kind === "parameter" && graph.from[node.index].length) {
      const reader = graph.from[node.index][0].consumer;
      const {elements, bytes} = found.get(reader) || {elements: 0, bytes: 0};
      found.set(reader, {elements: elements + lib.elements(node.tensor),
                         bytes: bytes + lib.bytes(node.tensor)});
    }
  return found;
};

// Return box -> text about the parameters of its operators; empty if there are none.
const parametersText = (graph, tree) => {
  const found = parametersOf(graph);
  const sum = (what) => summed(graph, tree, {of: (op) => found.get(op.index)?.[what] || 0});
  const elements = sum("elements"), bytes = sum("bytes");
  return (box) => elements(box)
    ? `${amanda.quantity(elements(box))} params, ${amanda.quantity(bytes(box), "B")}` : "";
};

// Return box -> its figure, from sums over the leaves that are made once.
const summed = (graph, tree, measure) => {
  const sums = (of) => {
    const found = new Float64Array(tree.leaves.length + 1);
    tree.leaves.forEach((box, n) => {
      const node = graph.nodes[box.index];
      found[n + 1] = found[n] + (lib.isOp(node) ? of(node) : 0);
    });
    return (box) => found[box.high] - found[box.low];
  };
  const value = sums(measure.of);
  if (!measure.per) return value;
  const whole = sums(measure.per);
  return (box) => { const of = whole(box); return of ? value(box) / of : 0; };
};

// Return the step of the colour scale for a value: 0 for none, then 1 to 7.
const levelOf = (value, most) => value > 0 && most > 0
  ? Math.min(LEVELS, 1 + Math.floor(LEVELS * value / most)) : 0;

// Return a number as text; shares are percentages.
const shown = (value, unit) =>
  unit === "%" ? `${Number((100 * value).toPrecision(3))} %` : amanda.quantity(value, unit);

Object.assign(lib, {measuresOf, parametersText, summed, levelOf, shown, LEVELS});
})();

"use strict";
// Details of the box that is selected: an operator, a source, or a module.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const {make} = amanda;

const table = (heads, rows, name = "") => {
  const cells = (tag, values) => make("tr", "", ...values.map((value) => make(tag, "", value)));
  const head = heads.some((one) => one) ? make("thead", "", cells("th", heads)) : null;
  return make("div", "scroll", make("table", name, head,
                                    make("tbody", "", ...rows.map((values) => cells("td", values)))));
};
const section = (title, content) => [make("h3", "", title), content];
const several = (parts) => make("div", "", ...parts.map((part) => make("div", "", part)));
const size = (tensor) => { const found = lib.bytes(tensor); return found ? amanda.quantity(found, "B") : ""; };
const broken = (name) => name.split(/(?<=[./])/).flatMap((part) => [part, make("wbr")]);
const facts = (pairs) => table(["", ""], pairs
  .filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => [make("span", "dim", name),
                           typeof value === "object" ? value : make("code", "", String(value))]));

// Return what the panel shows of a box; `reveal(index)` goes to another node.
const detailsOf = (canvas, box, measures, reveal) => {
  const link = (node) => {
    const button = make("button", "link", node.name);
    button.type = "button";
    button.addEventListener("click", () => reveal(node.index));
    return make("span", "", button, make("span", "dim", " " + lib.kindOf(node)));
  };
  return box.children ? ofModule(canvas, box, measures) : ofNode(canvas.graph, box.index, link);
};

const ofNode = (graph, index, link) => {
  const node = graph.nodes[index], {into, from} = graph;
  const passes = (edge, other) => {
    const found = [];
    if (edge.item !== null) found.push(`item ${edge.item}`);
    if (edge.output) found.push(`output ${edge.output}`);
    if (edge.output === null) found.push("written in place");
    if (edge.kind === "alias") found.push("through shared memory");
    if (edge.back) found.push("of an earlier execution");
    else if (edge.first) found.push(`from execution ${edge.first} on`);
    return make("span", "", link(other),
                found.length ? make("span", "dim", ` (${found.join(", ")})`) : null);
  };
  const parts = [make("h2", "", ...broken(node.name))];
  if (!lib.isOp(node)) {
    parts.push(facts([["kind", node.kind], ["tensor", lib.text(node.tensor)],
                      ["size", size(node.tensor)], ["program", node.program]]));
    parts.push(...section("Read by",
      several(from[index].map((edge) => passes(edge, graph.nodes[edge.consumer])))));
    return parts;
  }
  parts.push(facts([["type", node.type], ["common word", node.word], ["module", node.module],
                    ["source", node.source], ["program", node.program], ["zone", node.zone],
                    ["executions", node.executions], ["id", node.id]]));
  const notes = Object.entries(node.notes).filter(([, value]) => value !== null);
  if (notes.length)
    parts.push(...section("Notes of other tools", table(["", ""], notes.map(([name, value]) =>
      [make("span", "dim", lib.plain(name)), amanda.quantity(value, lib.unitOf(name))]))));
  const ends = (edges, position, end) => several(edges
    .filter((edge) => edge[end === "producer" ? "input" : "output"] === position)
    .map((edge) => passes(edge, graph.nodes[edge[end]])));
  parts.push(...section("Inputs", table(["", "tensor", "size", "from"],
    node.inputs.map((tensor, n) => [tensor, n]).filter(([tensor]) => tensor !== null)
      .map(([tensor, n]) => [node.input_names[n] || String(n), make("code", "", lib.text(tensor)),
                             size(tensor), ends(into[index], n, "producer")]))));
  parts.push(...section("Outputs", table(["", "tensor", "size", "to"],
    node.outputs.map((tensor, n) => [String(n), make("code", "", lib.text(tensor)), size(tensor),
                                     ends(from[index], n, "consumer")]))));
  const others = Object.entries(node.arguments);
  if (others.length)
    parts.push(...section("Arguments", table(["", ""],
      others.map(([name, value]) => [make("span", "dim", name), make("code", "", value)]))));
  if (node.forward !== null) parts.push(...section("Gradient of", link(graph.nodes[node.forward])));
  if (graph.backwardOf[index].length)
    parts.push(...section("Backward operators", several(graph.backwardOf[index].map(link))));
  return parts;
};

const ofModule = (canvas, box, measures) => {
  const parts = [make("h2", "", ...broken(canvas.pathOf(box).join(" / ")))];
  const what = {stack: "stack of equal modules", group: "part of a long list",
                zone: "part of the program", surrounding: "operators outside of modules",
                program: "program"}[box.kind] || "module";
  parts.push(facts([["kind", what], ["operators", box.ops], ["boxes inside", box.children.length],
                    ["parameters", canvas.parametersOf(box)]]));
  const figures = [...measures.values()].map((measure) =>
    [measure, lib.summed(canvas.graph, canvas.tree, measure)]);
  parts.push(...section("Sum of its operators", table(["", "", "of all"], figures
    .filter(([, of]) => of(box)).map(([measure, of]) =>
      [make("span", "dim", measure.name), lib.shown(of(box), measure.unit),
       measure.per ? "" : lib.shown(of(box) / of(canvas.tree.root), "%")]), "sums")));
  const [measure, of] = figures.find(([one]) => one === canvas.measure) || figures[0] || [];
  const rows = box.children.map((child) => [child, of ? of(child) : 0])
    .sort(([, a], [, b]) => b - a).slice(0, 12);
  parts.push(...section(measure ? `Inside, by ${measure.name}` : "Inside", table(["", ""], rows.map(([child, value]) => {
    const button = make("button", "link", child.children ? child.name : lib.shortName(child));
    button.type = "button";
    button.addEventListener("click", () => canvas.reveal(child));
    return [make("span", "", button, make("span", "dim", " " + canvas.lines(child)[1])),
            measure ? make("span", "figure", lib.shown(value, measure.unit)) : ""];
  }))));
  return parts;
};

Object.assign(lib, {detailsOf});
})();

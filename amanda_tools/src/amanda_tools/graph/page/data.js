"use strict";
// Graphs as data: from the rows of the page, or from a file `graph.json`, to nodes and edges.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const BYTES = {bool: 1, int4: .5, uint4: .5, bfloat16: 2, half: 2, float: 4, double: 8};

// Columns of a row; `graph/html.py` writes them in this order.
const OP = ["name", "type", "word", "module", "source", "id", "zone", "program", "forward",
            "is_backward", "executions", "input_names", "inputs", "outputs", "arguments", "notes"];
const EDGE = 7;

// Return the graph that `graph/html.py` packed: texts and tensor types stand in it once.
const unpacked = (packed) => {
  const text = (n) => n < 0 ? null : packed.texts[n];
  const type = (n) => n < 0 ? null : packed.types[n];
  const pairs = (flat, value) => {
    const found = {};
    for (let n = 0; n < flat.length; n += 2)
      Object.defineProperty(found, text(flat[n]), {value: value(flat[n + 1]), enumerable: true});
    return found;
  };
  const nodes = packed.nodes.map((row, index) => {
    if (row.length !== OP.length) {
      const [kind, name, tensor, program] = row;
      return {node: "source", index, kind: text(kind), name: text(name), tensor: type(tensor),
              program: text(program)};
    }
    const op = {node: "op", index};
    OP.forEach((column, n) => { op[column] = row[n]; });
    for (const column of ["name", "type", "word", "module", "source", "id", "zone", "program"])
      op[column] = text(op[column]);
    op.forward = op.forward < 0 ? null : op.forward;
    op.is_backward = Boolean(op.is_backward);
    op.input_names = op.input_names.map(text);
    op.inputs = op.inputs.map(type);
    op.outputs = op.outputs.map(type);
    op.arguments = pairs(op.arguments, text);
    op.notes = pairs(op.notes, (value) => Array.isArray(value) ? text(value[0]) : value);
    return op;
  });
  const edges = [], flat = packed.edges;
  for (let n = 0; n < flat.length; n += EDGE)
    edges.push({producer: flat[n], output: flat[n + 1] < 0 ? null : flat[n + 1],
                consumer: flat[n + 2], input: flat[n + 3],
                item: flat[n + 4] < 0 ? null : flat[n + 4],
                kind: flat[n + 5] & 1 ? "alias" : "value", back: Boolean(flat[n + 5] & 2),
                first: flat[n + 6]});
  return joined({namespace: packed.namespace, nodes, edges});
};

// Return the graphs of the content of a file `graph.json`; throw an error that says what is wrong.
const fromFile = (data) => {
  if (!data || data.format !== "amanda.graph/1" || !Array.isArray(data.graphs))
    throw new Error("The file is not a graph.json that the tool 'graph' wrote");
  return data.graphs.map((graph) => {
    for (const edge of graph.edges)
      if (!graph.nodes[edge.producer] || !graph.nodes[edge.consumer])
        throw new Error("The file is damaged: an edge leads to no node");
    for (const node of graph.nodes) if ("id" in node) node.id = String(node.id);
    return joined(graph);
  });
};

// Add to a graph what its queries need: the edges of each node, backward operators, unique keys.
const joined = (graph) => {
  graph.into = graph.nodes.map(() => []);
  graph.from = graph.nodes.map(() => []);
  graph.backwardOf = graph.nodes.map(() => []);
  for (const edge of graph.edges) {
    graph.into[edge.consumer].push(edge);
    graph.from[edge.producer].push(edge);
  }
  for (const edges of graph.into) edges.sort((a, b) => a.input - b.input || a.item - b.item);
  const seen = new Map();
  graph.keys = graph.nodes.map((node) => {
    if (isOp(node) && node.forward !== null) graph.backwardOf[node.forward].push(node);
    const name = `${isOp(node) ? "" : node.kind + " "}${node.name}`, count = seen.get(name) || 0;
    seen.set(name, count + 1);
    return count ? `${name} (${count + 1})` : name;
  });
  return graph;
};

const isOp = (node) => node.node === "op";
const kindOf = (node) => isOp(node) ? node.word || node.type : node.kind;

// Return a tensor type, or the nested list of types at a position, as text.
const text = (tensor) => {
  if (tensor === null || tensor === undefined) return "";
  if (Array.isArray(tensor)) return "(" + tensor.map(text).join(", ") + ")";
  const sizes = tensor.shape === null ? "..." : tensor.shape.map((n) => n === null ? "?" : n);
  return tensor.dtype + "[" + sizes + "]";
};
const shapes = (tensors) => tensors.map(text).filter((one) => one).join(" ");

const elements = (tensor) => {
  if (tensor === null || tensor === undefined) return 0;
  if (Array.isArray(tensor)) return tensor.reduce((sum, one) => sum + elements(one), 0);
  if (tensor.shape === null || tensor.shape.includes(null)) return 0;
  return tensor.shape.reduce((product, n) => product * n, 1);
};
const bytes = (tensor) => {
  if (tensor === null || tensor === undefined) return 0;
  if (Array.isArray(tensor)) return tensor.reduce((sum, one) => sum + bytes(one), 0);
  const bits = /(\d+)/.exec(tensor.dtype);
  return elements(tensor) * (BYTES[tensor.dtype] || (bits ? Number(bits[1]) / 8 : 0));
};

// The name of a figure ends with its unit.
const unitOf = (name) => (/ \(([^()]+)\)$/.exec(name) || ["", ""])[1];
const plain = (name) => name.replace(/ \([^()]+\)$/, "");
const counted = (number, word = "operator") =>
  number === 1 ? `1 ${word}` : `${number.toLocaleString("en")} ${word}s`;

Object.assign(lib, {unpacked, fromFile, joined, isOp, kindOf, text, shapes, elements, bytes, unitOf,
                    plain, counted});
})();

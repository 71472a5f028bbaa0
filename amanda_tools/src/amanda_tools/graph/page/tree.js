"use strict";
// The tree of boxes of a graph: modules, stacks of equal layers, what surrounds the model, groups of
// long lists, operators.
(() => {
const lib = (globalThis.amandaGraph ??= {});

// A box never has more children than this: a longer list is divided into groups.
const MOST_CHILDREN = 40;
// So many equal layers in a row become one stack.
const LEAST_EQUAL = 3;
// So many operators in a row that are in no module become one box beside the modules.
const LEAST_AROUND = 4;

// Return the tree: {root, boxes: by id, leafOf: by index of a node, leaves: in order}.
//
// `direction` is "forward", "backward" or "both". A box is {id, kind, name, parent, depth, children,
// index, low, high, ops, signature}: `children` is null for a leaf; its leaves are
// `leaves[low..high]`. With `beside`, another graph, layers are equal only if those of the same name
// there are, too, so that both trees have the same stacks.
const treeOf = (graph, direction = "forward", beside = null) => {
  const root = group(null, "", "program", graph.namespace);
  const tops = direction === "both"
    ? {forward: group(root, "forward:", "program", "forward"),
       backward: group(root, "backward:", "program", "backward")}
    : {forward: root, backward: root};
  for (const node of graph.nodes) {
    if (!lib.isOp(node)) {
      // Parameters and constants belong to the operators that read them: details lists them.
      if (node.kind !== "input" && node.kind !== "call") continue;
      const readers = graph.from[node.index].map((edge) => graph.nodes[edge.consumer]);
      for (const way of direction === "both" ? ["forward", "backward"] : [direction])
        if (way === "forward" ? readers.some((op) => !op.is_backward)
          : readers.length && readers.every((op) => op.is_backward))
          leaf(tops[way], graph, node);
      continue;
    }
    if (direction !== "both" && node.is_backward !== (direction === "backward")) continue;
    let at = tops[node.is_backward ? "backward" : "forward"];
    if (node.zone && node.zone !== "model") at = inside(at, `(${node.zone})`, "zone");
    const home = node.forward === null ? node : graph.nodes[node.forward];
    for (const part of home.module.split(/[./]/))
      if (part !== "") at = inside(at, part, "module");
    leaf(at, graph, node);
  }
  finished(root, graph, beside);
  return numbered(root);
};

const group = (parent, id, kind, name) => {
  const box = {id, kind, name, parent, depth: 0, children: [], index: null, named: new Map()};
  if (parent) parent.children.push(box);
  return box;
};
const inside = (parent, name, kind) => {
  let box = parent.named.get(name);
  if (!box) {
    box = group(parent, `${parent.id}${name}/`, kind, name);
    parent.named.set(name, box);
  }
  return box;
};
const leaf = (parent, graph, node) => parent.children.push({
  id: graph.keys[node.index], kind: lib.isOp(node) ? "op" : "source",
  name: node.name, parent, depth: 0, children: null, index: node.index});

// Give each box its signature, which equal layers share, and its stacks and groups.
const finished = (box, graph, beside) => {
  const signatures = new Map(), there = new Map();
  if (beside) beside.nodes.forEach((node, n) => there.set(beside.keys[n], signOf(node)));
  const signed = (text) => {
    let number = signatures.get(text);
    if (number === undefined) signatures.set(text, number = signatures.size);
    return number;
  };
  const visit = (one) => {
    if (!one.children) {
      const own = signOf(graph.nodes[one.index]);
      one.signature = signed(beside ? `${own}\n${there.get(one.id)}` : own);
      return;
    }
    one.children.forEach(visit);
    delete one.named;
    one.signature = signed("[" + one.children.map((child) => child.signature).join() + "]");
    one.children = divided(one, surrounded(one, stacked(one, !beside)));
  };
  visit(box);
};

// Return what a node is, in words that hold in every graph.
const signOf = (node) => lib.isOp(node)
  ? `${lib.kindOf(node)} ${lib.shapes(node.inputs)} > ${lib.shapes(node.outputs)}` : node.kind;

// Return the children with each run of equal modules as one stack; with `whole`, a module of which
// all are equal is the stack itself.
const stacked = (box, whole) => {
  const pattern = (child) => `${child.signature} ${child.name.replace(/\d+/g, "#")}`;
  const found = [];
  for (let start = 0, end; start < box.children.length; start = end) {
    const first = box.children[start];
    for (end = start + 1; end < box.children.length; end += 1)
      if (first.kind !== "module" || pattern(box.children[end]) !== pattern(first)) break;
    const run = box.children.slice(start, end);
    if (run.length < LEAST_EQUAL) found.push(...run);
    else if (whole && run.length === box.children.length && box.kind === "module") {
      box.kind = "stack";
      return run;
    }
    else found.push(gathered(box, run, "stack"));
  }
  return found;
};

// Return the children of a program with the operators around its modules (data, losses, clipping) as
// one box for each run of them, so that modules are on the outermost level.
const surrounded = (box, children) => {
  if (box.kind !== "program" || !children.some((child) => child.kind === "module")) return children;
  const found = [];
  let run = [];
  const end = () => {
    if (run.length < LEAST_AROUND) found.push(...run);
    else found.push(gathered(box, run, "surrounding"));
    run = [];
  };
  for (const child of children) {
    if (!child.children) run.push(child);
    else {
      if (child.kind !== "zone") end();
      found.push(child);
    }
  }
  end();
  return found;
};

// Return the children, as groups of groups if there are too many.
const divided = (box, children) => {
  if (children.length <= MOST_CHILDREN) return children;
  const levels = Math.ceil(Math.log(children.length) / Math.log(MOST_CHILDREN * .75));
  const size = Math.ceil(children.length ** ((levels - 1) / levels));
  const found = [];
  for (let start = 0; start < children.length; start += size)
    found.push(gathered(box, children.slice(start, start + size), "group"));
  return found;
};
const gathered = (parent, children, kind) => {
  const first = children[0], last = children[children.length - 1];
  const ends = `${shortName(first)} … ${shortName(last)}`;
  const name = kind === "stack" ? `${parent.name} ${ends}`.trim()
    : kind === "surrounding" ? `(program) ${ends}` : ends;
  const box = {id: `${parent.id}[${first.id}…${last.id}]`, kind, name, parent, depth: 0, children,
               index: null, signature: kind === "stack" ? first.signature : -1};
  for (const child of children) child.parent = box;
  box.children = divided(box, children);
  return box;
};
const shortName = (box) => box.name.replace(/^.*\//, "").replace(/ … .*$/, "");

const numbered = (root) => {
  const boxes = new Map(), leafOf = new Map(), leaves = [];
  const visit = (box, depth) => {
    box.depth = depth;
    // Two may have one name, as names are the program's.
    for (let count = 2, id = box.id; boxes.has(box.id); count += 1) box.id = `${id} (${count})`;
    box.low = leaves.length;
    boxes.set(box.id, box);
    if (box.children) for (const child of box.children) visit(child, depth + 1);
    else {
      leaves.push(box);
      leafOf.set(box.index, box);
    }
    box.high = leaves.length;
    box.ops = box.children ? box.children.reduce((sum, child) => sum + child.ops, 0)
      : Number(box.kind === "op");
  };
  visit(root, 0);
  return {root, boxes, leafOf, leaves};
};

const holds = (box, other) => box.low <= other.low && other.high <= box.high;

// Return the child of `box` that holds the leaf.
const childWith = (box, leafBox) => {
  let low = 0, high = box.children.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (box.children[middle].low <= leafBox.low) low = middle; else high = middle - 1;
  }
  return box.children[low];
};

// Return the edges of one level: between children of a box, and between them and what is outside.
//
// An end outside is null. Each edge counts the values that it stands for.
const edgesAt = (graph, tree, box) => {
  const found = new Map();
  const add = (from, to, edge) => {
    const key = `${from ? from.id : ""}\n${to ? to.id : ""}`;
    let one = found.get(key);
    if (!one) found.set(key, one = {key, from, to, values: new Set(), back: true});
    one.values.add(`${edge.producer} ${edge.output}`);
    one.back &&= edge.back;
  };
  for (let n = box.low; n < box.high; n += 1) {
    const one = tree.leaves[n], own = childWith(box, one);
    for (const edge of graph.from[one.index]) {
      const other = tree.leafOf.get(edge.consumer);
      if (!other) continue;
      if (!holds(box, other)) { add(own, null, edge); continue; }
      const end = childWith(box, other);
      if (end !== own) add(own, end, edge);
    }
    for (const edge of graph.into[one.index]) {
      const other = tree.leafOf.get(edge.producer);
      if (other && !holds(box, other)) add(null, own, edge);
    }
  }
  return [...found.values()].map(({values, ...one}) => ({...one, count: values.size}));
};

Object.assign(lib, {treeOf, signOf, edgesAt, holds, childWith, shortName, MOST_CHILDREN});
})();

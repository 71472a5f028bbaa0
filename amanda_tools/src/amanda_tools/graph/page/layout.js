"use strict";
// Places of the visible boxes and edges. dagre lays out one level at a time: the children of one
// unfolded box. A level is kept until something in it is folded or unfolded.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const HEADER = 28, PADDING = 12, HEIGHT = 44, STACK = 4;

// Estimate the width of a text, so that a layout needs no browser.
const widthOf = (text, size = 7) => Math.ceil([...text].length * size);
const cut = (text, most) => {
  const letters = [...text];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : text;
};

class Layout {
  // `labelOf(box)` returns the two lines of a box; `counts` gets the work that was done.
  constructor(graph, tree, fold, labelOf, counts) {
    Object.assign(this, {graph, tree, fold, labelOf, counts});
    this.levels = new Map();
    this.edges = new Map();
  }

  // Forget the levels that change when a box is folded or unfolded.
  changed(box) { for (let at = box; at; at = at.parent) this.levels.delete(at); }

  // Return {width, height, boxes, edges} with absolute coordinates; boxes come outermost first.
  run() {
    const found = {boxes: [], edges: []};
    const level = this.level(this.tree.root);
    found.width = level.width;
    found.height = level.height;
    const place = (owner, at, left, top) => {
      for (const edge of at.edges)
        found.edges.push({...edge, owner,
                          points: edge.points.map(({x, y}) => ({x: x + left, y: y + top}))});
      for (const box of at.boxes) {
        const x = box.x + left, y = box.y + top;
        found.boxes.push({...box, x, y});
        if (box.level) place(box.box, box.level, x + PADDING, y + HEADER);
      }
    };
    place(this.tree.root, level, 0, 0);
    return found;
  }

  level(owner) {
    const known = this.levels.get(owner);
    if (known) return known;
    let edges = this.edges.get(owner);
    if (!edges) this.edges.set(owner, edges = lib.edgesAt(this.graph, this.tree, owner));
    const plan = new dagre.graphlib.Graph({multigraph: true});
    plan.setGraph({rankdir: "TB", nodesep: 22, ranksep: 28, edgesep: 12, marginx: 2, marginy: 2});
    plan.setDefaultEdgeLabel(() => ({}));
    const boxes = new Map();
    owner.children.forEach((child, n) => {
      const unfolded = child.children && this.fold.isUnfolded(child);
      const level = unfolded ? this.level(child) : null;
      const label = this.labelOf(child);
      const lines = [cut(label[0], 30), cut(label[1], 54)];
      const width = level
        ? Math.max(level.width + 2 * PADDING, widthOf(lines[0], 8) + 60)
        : Math.max(108, widthOf(lines[0], 7.8) + (child.children ? 56 : 24) +
                   (child.kind === "stack" ? 34 : 0), widthOf(lines[1], 5.6) + 24);
      const height = level ? level.height + HEADER + PADDING : HEIGHT;
      boxes.set(child, {box: child, level, lines, width, height});
      plan.setNode(`b${n}`, {width, height});
      child.place = `b${n}`;
    });
    this.counts.laidOut += owner.children.length;
    this.counts.layouts += 1;
    for (const end of ["in", "out"])
      if (edges.some((edge) => edge[end === "in" ? "from" : "to"] === null))
        plan.setNode(end, {width: 10, height: 1});
    for (const edge of edges)
      plan.setEdge(edge.from ? edge.from.place : "in", edge.to ? edge.to.place : "out",
                   {weight: edge.from && edge.to ? 2 : 1}, edge.key);
    dagre.layout(plan);
    const size = plan.graph();
    for (const [child, box] of boxes) {
      const at = plan.node(child.place);
      box.x = at.x - box.width / 2;
      box.y = at.y - box.height / 2;
    }
    const level = {width: size.width || 0, height: size.height || 0, boxes: [...boxes.values()],
                   ports: {in: plan.node("in"), out: plan.node("out")}};
    level.edges = edges.map((edge) => {
      const from = edge.from ? edge.from.place : "in", to = edge.to ? edge.to.place : "out";
      const points = plan.edge(from, to, edge.key).points.map(({x, y}) => ({x, y}));
      const down = points[0].y < points[points.length - 1].y;
      // An edge that ends at an unfolded box goes on inside, from the middle of its border.
      const start = edge.from && boxes.get(edge.from), end = edge.to && boxes.get(edge.to);
      if (down && start && start.level && start.level.ports.out)
        points[0] = {x: start.x + PADDING + start.level.ports.out.x, y: start.y + start.height};
      if (down && end && end.level && end.level.ports.in)
        points[points.length - 1] = {x: end.x + PADDING + end.level.ports.in.x, y: end.y};
      // Between neighbouring ranks, the way by the middles of boxes would be a detour.
      const moved = [start, end].some((one) => one && one.level);
      if (down && moved && edge.from && edge.to && points.length === 3) points.splice(1, 1);
      if (!edge.from) points[0] = {x: level.ports.in.x, y: -HEADER};
      if (!edge.to) points[points.length - 1] = {x: level.ports.out.x, y: level.height + PADDING};
      const arrow = Boolean(edge.to) && !(end && end.level && down);
      return {...edge, points, arrow};
    });
    this.levels.set(owner, level);
    return level;
  }
}

// Return a smooth path through points.
const pathOf = (points) => {
  const at = ({x, y}) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const middle = (a, b) => ({x: (a.x + b.x) / 2, y: (a.y + b.y) / 2});
  if (points.length < 3) {
    const [start, end] = points, height = (start.y + end.y) / 2;
    return `M${at(start)}C${at({x: start.x, y: height})} ${at({x: end.x, y: height})} ${at(end)}`;
  }
  let path = `M${at(points[0])}L${at(middle(points[0], points[1]))}`;
  for (let n = 1; n < points.length - 1; n += 1)
    path += `Q${at(points[n])} ${at(middle(points[n], points[n + 1]))}`;
  return path + `L${at(points[points.length - 1])}`;
};

Object.assign(lib, {Layout, pathOf, cut, HEADER, STACK});
})();

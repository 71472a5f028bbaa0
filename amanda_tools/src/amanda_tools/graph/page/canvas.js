"use strict";
// One graph on a canvas: draws what is unfolded, marks what is selected, found and different.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const SVG = "http://www.w3.org/2000/svg";

// Families of operators, which colours tell apart, and the common types that they have.
const FAMILIES = [
  ["matrix product", /^(conv|linear|matmul|bmm|addmm|mm$|einsum|dense|baddbmm|attention|scaled_dot|sdpa|lstm|gru|rnn|bilinear)/i],
  ["activation", /^(relu|gelu|silu|sigmoid|tanh|softmax|log_softmax|elu|selu|celu|leaky|hard|mish|softplus|swish|prelu|glu)/i],
  ["normalisation", /(norm|dropout)/i],
  ["lookup", /^(embedding|gather|index|take|scatter|one_hot|where|masked)/i],
  ["pooling, reduction", /(pool|^mean|^sum|^max|^min|^amax|^argmax|^reduce|^var|^std|^norm$|loss|cross_entropy)/i],
  ["arithmetic", /^(add|sub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|square|clamp|minimum|maximum|cumsum)/i],
  ["rearrangement", /^(reshape|view|transpose|permute|squeeze|unsqueeze|expand|tile|repeat|identity|slice|split|concat|stack|flip|roll|tril|triu|flatten|pad|contiguous|getitem|__getitem__|cat|chunk|t$|strided|copy|clone|cast|to$)/i],
  ["other", /(?:)/],
];
const families = new Map();
const familyOf = (kind) => {
  let found = families.get(kind);
  if (!found) families.set(kind, found = 1 + FAMILIES.findIndex(([, pattern]) => pattern.test(kind)));
  return found;
};

const add = (parent, tag, attributes, content) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (content !== undefined) element.textContent = content;
  lib.counts.drawn += 1;
  return parent.appendChild(element);
};

class Canvas {
  // `on` has select(box), change(): the view or what is unfolded, fold(box, unfolded), and say(text).
  constructor(host, graph, on) {
    Object.assign(this, {host, graph, on, selected: null, found: null, differs: null,
                         measure: null, direction: null, active: null});
    this.svg = host.appendChild(document.createElementNS(SVG, "svg"));
    this.svg.setAttribute("class", "canvas");
    this.svg.setAttribute("role", "tree");
    this.svg.setAttribute("aria-label", `Boxes of ${graph.namespace}`);
    this.map = host.appendChild(document.createElement("canvas"));
    this.map.className = "minimap";
    this.map.setAttribute("aria-hidden", "true");
    this.view = new lib.View(this.svg, this.map, () => { this.minimap.draw(); on.change(); });
    this.minimap = new lib.Minimap(this.map, this.view);
    this.paths = new Map();
    this.elements = new Map();
    this.listen();
  }

  // Show the forward or the backward program, or both; `beside` is the graph to compare with.
  direct(direction, beside = null) {
    this.direction = direction;
    this.tree = lib.treeOf(this.graph, direction, beside);
    this.fold = new lib.Fold(this.tree);
    this.fold.begin();
    this.parametersOf = lib.parametersText(this.graph, this.tree);
    this.layout = new lib.Layout(this.graph, this.tree, this.fold, (box) => this.lines(box), lib.counts);
    for (const old of [this.paths, this.elements]) {
      for (const element of old.values()) {
        element.caption?.remove();
        element.remove();
      }
      old.clear();
    }
    this.places = null;
    this.families = new Set(this.tree.leaves.map((leaf) => this.familyAt(leaf)));
    this.selected = null;
    this.active = null;
    this.sums();
  }

  color(measure) {
    this.measure = measure;
    this.sums();
    this.draw();
  }

  sums() {
    this.figure = this.measure ? lib.summed(this.graph, this.tree, this.measure) : null;
  }

  // Return the two lines of a box.
  lines(box) {
    if (box.kind === "source") {
      const node = this.graph.nodes[box.index];
      return [node.name, `${node.kind} ${lib.text(node.tensor)}`];
    }
    if (!box.children) {
      const node = this.graph.nodes[box.index];
      return [lib.kindOf(node), lib.shapes(node.outputs)];
    }
    if (box.high - box.low === 1) {
      const node = this.graph.nodes[this.tree.leaves[box.low].index], own = this.parametersOf(box);
      const shapes = lib.isOp(node) ? lib.shapes(node.outputs) : "";
      return [box.name, `${lib.kindOf(node)} ${shapes}${own && `; ${own}`}`];
    }
    const each = box.kind === "stack" ? `, ${box.children[0].ops} each` : "";
    const parameters = this.parametersOf(box);
    return [box.name, lib.counted(box.ops) + each + (parameters && `; ${parameters}`)];
  }

  // Draw what is unfolded now. Elements of boxes and edges that stay are only moved.
  draw() {
    const {boxes, edges, width, height} = this.layout.run();
    this.view.bounds = {width: Math.max(1, width), height: Math.max(1, height)};
    this.places = new Map(boxes.map((box) => [box.box, box]));
    if (!this.frames) this.prepare();
    const before = [this.paths, this.elements];
    this.paths = new Map();
    this.elements = new Map();
    for (const edge of edges) {
      const key = `${edge.owner.id}\n${edge.key}`;
      this.paths.set(key, this.drawEdge(edge, before[0].get(key)));
    }
    for (const box of boxes) this.elements.set(box.box, this.drawBox(box, before[1].get(box.box)));
    before.forEach((old, n) => {
      const now = new Set([this.paths, this.elements][n].values());
      for (const element of old.values()) if (!now.has(element)) {
        element.caption?.remove();
        element.remove();
      }
    });
    this.colorBoxes();
    this.mark();
    this.view.set(this.view.x, this.view.y, this.view.scale, false);
    this.minimap.draw();
  }

  prepare() {
    const defs = add(this.svg, "defs", {});
    const marker = (id) => add(add(defs, "marker", {id, viewBox: "0 0 8 8", refX: 7, refY: 4,
      markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto"}),
      "path", {d: "M0 0L8 4L0 8z"});
    this.head = `head-${(lib.heads = (lib.heads || 0) + 1)}`;
    marker(this.head);
    marker(`${this.head}-lit`);
    this.frames = add(this.svg, "g", {class: "frames", role: "none"});
    this.ways = add(this.svg, "g", {class: "edges", "aria-hidden": "true"});
    this.tops = add(this.svg, "g", {class: "boxes", role: "none"});
    this.captions = add(this.svg, "g", {class: "captions", "aria-hidden": "true"});
  }

  drawEdge(edge, old) {
    const path = old || add(this.ways, "path", {class: edge.back ? "edge back" : "edge"});
    path.setAttribute("d", lib.pathOf(edge.points));
    if (!old) {
      path.style.strokeWidth = Math.min(5, 1.1 + .45 * Math.log2(edge.count));
      const name = (box) => box ? box.name || "program" : "outside";
      add(path, "title", {}, `${name(edge.from)} to ${name(edge.to)}: ${lib.counted(edge.count, "value")}`);
      if (edge.count > 1 && edge.from && edge.to)
        path.caption = add(this.ways, "text", {class: "count"}, `×${edge.count}`);
    }
    path.arrow = edge.arrow;
    if (path.caption) {
      const middle = edge.points[Math.floor(edge.points.length / 2)];
      path.caption.setAttribute("x", middle.x + 6);
      path.caption.setAttribute("y", middle.y + 4);
    }
    return path;
  }

  drawBox({box, level, lines, x, y, width, height}, old) {
    const form = [Boolean(level), width, height, ...lines].join("\n");
    const transform = `translate(${x.toFixed(1)} ${y.toFixed(1)})`;
    if (old && old.form === form) {
      old.setAttribute("transform", transform);
      old.caption?.setAttribute("transform", transform);
      return old;
    }
    const group = add(level ? this.frames : this.tops, "g", {class: `box ${box.kind}`,
      role: "treeitem", tabindex: -1, transform, "aria-level": box.depth});
    group.box = box;
    group.form = form;
    if (box.kind === "stack" && !level)
      for (const n of [2, 1])
        add(group, "rect", {class: "under", x: n * lib.STACK, y: n * lib.STACK, width, height, rx: 7});
    add(group, "rect", {class: "body", width, height, rx: level ? 10 : 7});
    const family = level ? 0 : this.familyAt(box);
    if (family) {
      group.classList.add(`family-${family}`);
      add(group, "rect", {class: "family", x: 0, y: 6, width: 4, height: height - 12, rx: 2});
    } else if (!level && box.ops) this.drawFamilies(group, box, width, height);
    const middle = width / 2 - (box.children ? 9 : 0) + (box.kind === "stack" ? 12 : 0);
    // Edges pass below the names of unfolded boxes.
    if (level) group.caption = add(this.captions, "text", {class: "label", x: 12, y: 19, transform}, lines[0]);
    else {
      add(group, "text", {class: "label", x: middle, y: 18, "text-anchor": "middle"}, lines[0]);
      add(group, "text", {class: "sub", x: width / 2, y: box.children ? 33 : 34, "text-anchor": "middle"}, lines[1]);
    }
    if (box.children) {
      group.setAttribute("aria-expanded", String(Boolean(level)));
      const handle = add(group, "g", {class: "handle", transform: `translate(${width - 14} 14)`});
      add(handle, "circle", {r: 8});
      add(handle, "path", {d: level ? "M-4 0H4" : "M-4 0H4M0 -4V4"});
    }
    if (box.kind === "stack") {
      const text = `×${box.high > box.low ? this.members(box) : 0}`;
      add(group, "text", {class: "times", x: level ? width - 30 : 10, y: 18,
                          "text-anchor": level ? "end" : "start"}, text);
    }
    const full = [...this.pathOf(box), this.lines(box)[1]].join(" / ");
    add(group, "title", {}, box.children ? full : this.graph.nodes[box.index].name + "\n" + this.lines(box)[1]);
    // Words that are drawn apart are so in its text, too.
    for (const text of group.querySelectorAll("text, title")) text.before(" ");
    this.call(group, box);
    return group;
  }

  // Set what a box is called: what it shows, by which it is asked for in speech, and its title,
  // then its kind and what it measures.
  call(element, box, measured = "") {
    const shown = [...element.querySelectorAll("text, title")].map((text) => text.textContent).join(" ");
    const kind = box.kind === "op" ? "" : box.kind;
    const label = [shown.replace(/\s+/g, " ").trim(), kind, measured].filter(Boolean).join(", ");
    element.setAttribute("aria-label", label);
  }

  // Return the family of an operator, or of a module that has only one; 0 for other boxes.
  familyAt(box) {
    if (box.high - box.low !== 1) return 0;
    const node = this.graph.nodes[this.tree.leaves[box.low].index];
    return lib.isOp(node) ? familyOf(lib.kindOf(node)) : 0;
  }

  // Draw of which kinds the operators of a folded box are, as one bar.
  drawFamilies(group, box, width, height) {
    const counts = FAMILIES.map(() => 0);
    for (let n = box.low; n < box.high; n += 1) {
      const family = this.familyAt(this.tree.leaves[n]);
      if (family) counts[family - 1] += 1;
    }
    let x = 10;
    counts.forEach((count, n) => {
      const wide = (width - 20) * count / box.ops;
      if (count) add(group, "rect", {class: `share family-${n + 1}`, x, y: height - 6, width: wide, height: 3});
      x += wide;
    });
  }

  members(stack) {
    const count = (box) => box.children.reduce((sum, child) =>
      sum + (child.kind === "group" ? count(child) : 1), 0);
    return count(stack);
  }

  pathOf(box) {
    const found = [];
    for (let at = box; at.parent; at = at.parent) found.unshift(at.name);
    return found;
  }

  // Colour the boxes by the measure, relative to the largest that is visible; no layout.
  colorBoxes() {
    const folded = [...this.places.values()].filter((place) => !place.level).map((place) => place.box);
    const most = this.figure ? Math.max(0, ...folded.map(this.figure)) : 0;
    this.most = this.on.most ? this.on.most(most, this) : most;
    const total = this.figure ? this.figure(this.tree.root) : 0;
    const small = [], colors = new Map();
    const color = (name) => colors.get(name) || colors.set(name, amanda.color(name)).get(name);
    for (const [box, place] of this.places) {
      const element = this.elements.get(box), value = this.figure ? this.figure(box) : 0;
      const level = place.level ? 0 : lib.levelOf(value, this.most);
      element.classList.remove(...[...element.classList].filter((name) => name.startsWith("heat-")));
      if (this.figure && !place.level) element.classList.add(`heat-${level}`);
      let measured = "";
      const sub = element.querySelector(".sub");
      if (this.figure) {
        const part = total ? 100 * value / total : 0;
        const share = this.measure.per || part < .1 ? "" : ` · ${Number(part.toPrecision(2))} %`;
        const text = lib.shown(value, this.measure.unit) + share;
        if (sub) sub.textContent = value ? text : place.lines[1];
        measured = `${this.measure.name} ${text}`;
      } else if (sub) sub.textContent = place.lines[1];
      this.call(element, box, measured);
      const family = this.familyAt(box);
      const own = level ? `--scale-${level}` : place.level ? "--line"
        : family && !this.figure ? `--category-${family}` : "--map-box";
      small.push({...place, frame: Boolean(place.level), color: color(own)});
    }
    this.minimap.boxes = small;
    this.on.colored();
    this.minimap.frameColor = color("--accent");
  }

  // Mark what is selected with its edges and neighbours, what is found and what differs; no layout.
  mark() {
    for (const [box, element] of this.elements) {
      const own = this.selected === box;
      element.classList.toggle("selected", own);
      element.setAttribute("aria-selected", String(own));
      element.classList.remove("holds-selected", "neighbour", "counterpart", "only", "differs");
      if (this.differs) {
        const kind = this.differs.get(box.id);
        if (kind) element.classList.add(kind);
      }
    }
    for (const path of this.paths.values()) {
      path.classList.remove("lit");
      if (path.arrow) path.setAttribute("marker-end", `url(#${this.head})`);
      else path.removeAttribute("marker-end");
    }
    if (this.selected) this.markSelected();
    this.markFound();
    const focus = this.active && this.elements.get(this.active) ? this.active
      : this.selected && this.fold.shown(this.selected) || this.tree.root.children[0];
    if (focus) this.activate(focus, false);
  }

  markSelected() {
    const box = this.selected, shown = this.fold.shown(box);
    if (shown && shown !== box) this.elements.get(shown)?.classList.add("holds-selected");
    const lit = (owner, key) => {
      const path = this.paths.get(`${owner.id}\n${key}`);
      if (!path || path.classList.contains("lit")) return;
      path.classList.add("lit");
      if (path.arrow) path.setAttribute("marker-end", `url(#${this.head}-lit)`);
    };
    const neighbours = new Set();
    // Light the way of a value from a leaf to another: out of its boxes, across, and in again.
    const way = (from, to) => {
      let owner = from.parent, below = from;
      for (; !lib.holds(owner, to); below = owner, owner = owner.parent)
        lit(owner, `${below.id}\n`);
      let inner = to.parent, last = to;
      for (; inner !== owner; last = inner, inner = inner.parent) lit(inner, `\n${last.id}`);
      lit(owner, `${below.id}\n${last.id}`);
    };
    for (let n = box.low; n < box.high; n += 1) {
      const leaf = this.tree.leaves[n];
      for (const [edges, end] of [[this.graph.from, "consumer"], [this.graph.into, "producer"]])
        for (const edge of edges[leaf.index]) {
          const other = this.tree.leafOf.get(edge[end]);
          if (!other || lib.holds(box, other)) continue;
          if (end === "consumer") way(leaf, other); else way(other, leaf);
          neighbours.add(this.fold.shown(other));
        }
    }
    for (const one of neighbours) this.elements.get(one)?.classList.add("neighbour");
    for (const one of this.counterparts(box)) this.elements.get(one)?.classList.add("counterpart");
  }

  // Return the visible boxes of the backward operators of a forward box, or the other way.
  counterparts(box) {
    const found = new Set();
    if (this.direction !== "both") return found;
    for (let n = box.low; n < box.high; n += 1) {
      const node = this.graph.nodes[this.tree.leaves[n].index];
      if (!lib.isOp(node)) continue;
      const others = node.forward === null ? this.graph.backwardOf[node.index].map((op) => op.index)
        : [node.forward];
      for (const index of others) {
        const leaf = this.tree.leafOf.get(index);
        if (leaf) found.add(this.fold.shown(leaf));
      }
    }
    return found;
  }

  // Mark what is found in each visible box; elements change only where the number does.
  markFound() {
    const {leaves} = this.tree;
    let sums = null;
    if (this.found) {
      sums = new Int32Array(leaves.length + 1);
      for (const index of this.found) {
        const leaf = this.tree.leafOf.get(index);
        if (leaf) sums[leaf.low + 1] = 1;
      }
      for (let n = 0; n < leaves.length; n += 1) sums[n + 1] += sums[n];
    }
    for (const [box, element] of this.elements) {
      const count = sums ? sums[box.high] - sums[box.low] : -1, place = this.places.get(box);
      if (element.count === count) continue;
      element.count = count;
      element.classList.toggle("holds-found", count > 0 && !place.level);
      element.classList.toggle("dimmed", count === 0);
      const text = count > 0 && !place.level && box.children ? String(count) : "";
      if (!text) { element.badge?.remove(); element.badge = null; continue; }
      if (!element.badge) {
        element.badge = add(element, "g", {class: "badge",
          transform: `translate(${place.width - 4} ${place.height - 2})`});
        add(element.badge, "rect", {y: -9, height: 16, rx: 8});
        add(element.badge, "text", {y: 3, "text-anchor": "middle"});
      }
      element.badge.firstChild.setAttribute("x", -8 - 7 * text.length);
      element.badge.firstChild.setAttribute("width", 10 + 7 * text.length);
      element.badge.lastChild.setAttribute("x", -3 - 3.5 * text.length);
      element.badge.lastChild.textContent = text;
    }
  }

  // Highlight nodes by index; null for none.
  highlight(found) {
    this.found = found;
    this.markFound();
  }

  // Fold or unfold a box, which stays where it is on the screen.
  toggle(box, unfold = !this.fold.isUnfolded(box), told = true) {
    if (!box.children || !box.parent || this.fold.isUnfolded(box) === unfold) return;
    const before = this.places.get(box);
    let folded = [];
    if (unfold) folded = this.fold.unfold(box);
    else this.fold.fold(box);
    for (const one of [box, ...folded]) this.layout.changed(one);
    this.relaid(box, before);
    if (folded.length)
      this.on.say(`Folded ${lib.counted(folded.length, "box").replace("boxs", "boxes")} to show at most ${this.fold.limit}`);
    if (told) this.on.fold(box, unfold);
  }

  relaid(box, before) {
    this.draw();
    const after = this.places.get(box);
    if (before && after) {
      // An unfolded box keeps its upper edge and its middle.
      const dx = after.x + after.width / 2 - before.x - before.width / 2, dy = after.y - before.y;
      this.view.set(this.view.x + dx, this.view.y + dy, this.view.scale);
      if (after.width * this.view.scale < this.view.size.width)
        this.view.reach({...after, height: Math.min(after.height, this.view.size.height / this.view.scale / 2)});
    }
    this.on.change();
  }

  unfoldAll() {
    this.fold.unfoldWhile(this.fold.limit);
    this.layout.levels.clear();
    this.draw();
    this.view.fit(true);
  }

  foldAll() {
    this.fold.foldAll();
    this.layout.levels.clear();
    this.draw();
    this.view.fit(true);
  }

  // Select a box; null for none.
  select(box, told = true) {
    this.selected = box;
    if (box && this.elements.has(box)) this.active = box;
    this.mark();
    if (told) this.on.select(box);
    this.on.change();
  }

  // Unfold what a box is in, select it, and move it into view.
  reveal(box, told = true) {
    if (!this.fold.isVisible(box)) {
      const folded = this.fold.unfold(box.parent);
      for (const one of [box, ...folded]) this.layout.changed(one);
      this.layout.levels.clear();
      this.draw();
    }
    this.select(box, told);
    if (this.view.scale < .45) this.view.zoom(.8 / this.view.scale);
    this.view.reach(this.places.get(box));
  }

  activate(box, focus = true) {
    const old = this.active && this.elements.get(this.active);
    if (old) old.setAttribute("tabindex", -1);
    this.active = box;
    const element = this.elements.get(box);
    if (!element) return;  // Of a graph without boxes.
    element.setAttribute("tabindex", 0);
    if (focus) {
      element.focus({preventScroll: true});
      this.view.reach(this.places.get(box));
    }
  }

  // Return the nearest visible box in a direction: along an edge, or else by its place.
  neighbour(box, key) {
    const at = this.places.get(box);
    const middle = (place) => [place.x + place.width / 2, place.y + Math.min(place.height, 50) / 2];
    const [x, y] = middle(at);
    const others = [...this.places.values()].filter((place) => place !== at);
    const cost = (place, linked = false) => {
      const [a, b] = middle(place), dx = a - x, dy = b - y, aside = linked ? .5 : 2;
      if (key === "ArrowDown") return dy > 4 ? dy + aside * Math.abs(dx) : Infinity;
      if (key === "ArrowUp") return dy < -4 ? -dy + aside * Math.abs(dx) : Infinity;
      if (key === "ArrowRight") return dx > 4 ? dx + 4 * Math.abs(dy) : Infinity;
      return dx < -4 ? -dx + 4 * Math.abs(dy) : Infinity;
    };
    const linked = new Set();
    if (key === "ArrowDown" || key === "ArrowUp") {
      if (at.level && key === "ArrowDown") return box.children[0];
      for (const edge of lib.edgesAt(this.graph, this.tree, box.parent)) {
        if (key === "ArrowDown" && edge.from === box && edge.to) linked.add(edge.to);
        if (key === "ArrowUp" && edge.to === box && edge.from) linked.add(edge.from);
      }
    }
    const best = (places, along) => places.reduce((found, place) =>
      cost(place, along) < (found ? cost(found, along) : Infinity) ? place : found, null);
    const next = best(others.filter((place) => linked.has(place.box)), true) || best(others, false);
    return next && next.box;
  }

  listen() {
    const boxAt = (event) => event.target.closest?.(".box")?.box;
    this.svg.addEventListener("click", (event) => {
      if (this.view.moved) return;
      const box = boxAt(event);
      if (!box) { this.select(null); return; }
      this.activate(box, false);
      if (event.target.closest(".handle")) this.toggle(box);
      else this.select(box);
    });
    this.svg.addEventListener("dblclick", (event) => {
      const box = boxAt(event);
      if (box && box.children && !event.target.closest(".handle")) this.toggle(box);
      event.preventDefault();
    });
    this.svg.addEventListener("keydown", (event) => {
      const box = this.active;
      if (!box || event.ctrlKey || event.metaKey || event.altKey) return;
      const to = (other) => { if (other) { this.activate(other); this.select(other); } };
      const unfolded = box.children && this.fold.isUnfolded(box);
      const go = {
        Enter: () => { if (!box.children) this.on.enter(box); else if (!unfolded) { this.toggle(box, true); this.activate(box); } else to(box.children[0]); },
        " ": () => { this.toggle(box); this.activate(box); },
        Escape: () => {
          const outer = unfolded ? box : box.parent;
          if (!outer.parent) { this.select(null); return; }
          this.toggle(outer, false);
          this.activate(outer);
          this.select(outer);
        },
        Home: () => to(this.tree.root.children[0]),
        End: () => to(this.tree.root.children[this.tree.root.children.length - 1]),
        "+": () => this.view.zoom(1.25), "=": () => this.view.zoom(1.25), "-": () => this.view.zoom(.8),
        0: () => this.view.fit(),
      }[event.key] || (event.key.startsWith("Arrow") && (() => to(this.neighbour(box, event.key))));
      if (!go) return;
      event.preventDefault();
      go();
    });
  }
}

Object.assign(lib, {Canvas, FAMILIES, familyOf, counts: {laidOut: 0, layouts: 0, drawn: 0, scanned: 0}});
})();

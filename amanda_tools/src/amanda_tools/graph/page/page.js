"use strict";
// The page: tools above, one canvas or two, and details of what is selected.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const {make} = amanda;
const MOST_RESULTS = 50;
const DIRECTIONS = [["forward", "forward"], ["backward", "backward"], ["both", "forward and backward"]];

const button = (text, label, onClick) => {
  const found = make("button", "", text);
  found.type = "button";
  if (label) { found.title = label; found.setAttribute("aria-label", label); }
  found.addEventListener("click", onClick);
  return found;
};
const choice = (name, label, onChange) => {
  const select = make("select", name);
  select.addEventListener("change", () => onChange(select.value));
  return [make("label", `${name}-label`, label + " ", select), select];
};

class Page {
  // `own` is true if the page has the address for itself, and then keeps the place in it.
  constructor(host, graphs, own) {
    Object.assign(this, {host, graphs, own, canvases: [], linking: false, other: null});
    host.classList.add("graph-page");
    this.build();
    if (!graphs.length) {
      this.title.textContent = "No operators were seen";
      this.tools.hidden = true;
      return;
    }
    const place = own ? lib.placeOf(location.hash) : lib.placeOf("");
    // The largest first, as most have a few operators in another mode.
    const most = graphs.reduce((best, one, n) =>
      one.nodes.length > graphs[best].nodes.length ? n : best, 0);
    this.choose(graphs[place.graph] ? Number(place.graph) : most, place);
    if (own) addEventListener("hashchange", () => {
      if (location.hash.slice(1) !== this.written) this.go(lib.placeOf(location.hash));
    });
  }

  get main() { return this.canvases[0]; }

  build() {
    this.title = make(this.own ? "h1" : "p", "title");
    [this.graphLabel, this.graphChoice] = choice("graph", "Graph", (n) => this.choose(Number(n)));
    [this.directionLabel, this.directionChoice] = choice("direction", "Show", (way) => this.direct(way));
    [this.colorLabel, this.colorChoice] = choice("color", "Colours", (name) => this.color(name));
    [this.compareLabel, this.compareChoice] = choice("compare", "Beside", (which) => this.compare(which));
    this.directionChoice.append(...DIRECTIONS.map(([value, text]) => new Option(text, value)));
    this.search = make("input", "search");
    Object.assign(this.search, {type: "search", placeholder: "Search  ( / )", title: "Words in names, types, modules, sources",
                                autocomplete: "off", spellcheck: false});
    this.search.setAttribute("aria-label", "Search operators");
    this.results = make("ul", "results");
    this.results.hidden = true;
    this.found = make("p", "found");
    this.found.setAttribute("role", "status");
    const searching = make("div", "searching", this.search);
    this.file = make("input", "file");
    Object.assign(this.file, {type: "file", accept: ".json,application/json", hidden: true});
    this.exportChoice = make("select", "export");
    this.exportChoice.setAttribute("aria-label", "Save the drawing");
    this.exportChoice.append(new Option("Save as…", ""), new Option("SVG"), new Option("PNG"));
    this.tools = make("div", "tools", searching, this.graphLabel, this.directionLabel,
      this.colorLabel, this.compareLabel,
      make("span", "buttons",
        button("Unfold", "Unfold all, as far as there is space", () => this.each((one) => one.unfoldAll())),
        button("Fold", "Fold all", () => this.each((one) => one.foldAll())),
        button("−", "Zoom out (-)", () => this.main.view.zoom(.8)),
        button("+", "Zoom in (+)", () => this.main.view.zoom(1.25)),
        button("Fit", "Fit the whole drawing (0)", () => this.main.view.fit())),
      this.exportChoice, this.file);
    this.stage = make("div", "stage");
    this.legend = make("div", "legend");
    // On a narrow screen it scrolls, which must be possible by keyboard.
    this.legend.tabIndex = 0;
    this.legend.setAttribute("role", "group");
    this.legend.setAttribute("aria-label", "Colours");
    this.said = make("p", "said");
    this.said.setAttribute("role", "status");
    this.panel = make("article", "details");
    this.panel.tabIndex = -1;
    this.panel.setAttribute("aria-live", "polite");
    const board = make("div", "board", this.stage, this.legend, this.said);
    this.host.append(make("div", "head", this.title, this.tools), make("div", "content", board,
      make("div", "side", this.found, this.results, this.panel)));
    this.listen();
  }

  // Show one of the graphs.
  choose(number, place = lib.placeOf("")) {
    this.number = number;
    const graph = this.graph = this.graphs[number];
    this.graphChoice.replaceChildren(...this.graphs.map((one, n) => new Option(one.namespace, n)));
    this.graphChoice.value = number;
    this.graphLabel.hidden = this.graphs.length < 2;
    this.compareChoice.replaceChildren(new Option("nothing", ""),
      ...this.graphs.map((one, n) => new Option(one.namespace, n)).filter((_, n) => n !== number),
      new Option("another run's graph.json…", "file"));
    this.index = new lib.Search(graph, lib.counts);
    const forward = graph.nodes.filter((node) => lib.isOp(node) && !node.is_backward).length;
    const backward = graph.nodes.filter((node) => lib.isOp(node) && node.is_backward).length;
    this.title.textContent =
      `${graph.namespace}: ${lib.counted(forward)}, ${backward.toLocaleString("en")} backward`;
    if (this.own) document.title = `Graph of ${graph.namespace}`;
    this.directionLabel.hidden = !forward || !backward;
    this.stage.replaceChildren();
    this.canvases = [];
    this.other = null;
    this.addCanvas(graph);
    const way = DIRECTIONS.some(([one]) => one === place.direction) ? place.direction
      : forward || !backward ? "forward" : "backward";
    this.directionChoice.value = way;
    this.main.direct(way);
    this.measured();
    this.go(place);
  }

  addCanvas(graph) {
    const host = this.stage.appendChild(make("div", "pane"));
    if (this.canvases.length)
      host.append(make("p", "pane-title", this.compareChoice.selectedOptions[0]?.text || graph.namespace));
    const canvas = new lib.Canvas(host, graph, {
      select: (box) => this.selected(canvas, box),
      change: () => this.changed(canvas),
      fold: (box, unfolded) => this.linked(canvas, (other) => {
        const twin = other.tree.boxes.get(box.id);
        if (twin) other.toggle(twin, unfolded, false);
      }),
      colored: () => { if (canvas === this.main) this.drawLegend(); },
      enter: () => this.panel.focus(),
      say: (text) => this.say(text),
      most: (most) => this.canvases.length > 1 ? this.shared(most) : most,
    });
    canvas.view.shared = !this.own;
    this.canvases.push(canvas);
    return canvas;
  }

  // Offer the measures that a graph of the page has.
  measured() {
    this.measures = this.canvases.map((canvas) => lib.measuresOf(canvas.graph));
    const names = [...new Set(this.measures.flatMap((one) => [...one.keys()]))];
    const old = this.colorChoice.value;
    this.colorChoice.replaceChildren(new Option("kind of operator", ""), ...names.map((name) => new Option(name)));
    if (names.includes(old)) this.colorChoice.value = old;
  }

  // Return the figure of the hottest box on both sides, so that both have one scale.
  shared(most) {
    return Math.max(most, ...this.canvases.filter((one) => one.figure && one.places)
      .map((one) => Math.max(0, ...[...one.places.values()].filter((place) => !place.level)
        .map((place) => one.figure(place.box)))));
  }

  // Say something for some seconds.
  say(text) {
    this.said.textContent = text;
    clearTimeout(this.saying);
    this.saying = setTimeout(() => { this.said.textContent = ""; }, 8000);
  }

  each(call) { for (const canvas of this.canvases) call(canvas); }

  // Do something to the other canvas without its answer coming back.
  linked(canvas, call) {
    if (this.linking || this.canvases.length < 2) return;
    this.linking = true;
    try { this.each((other) => { if (other !== canvas) call(other); }); } finally { this.linking = false; }
  }

  direct(way) {
    this.each((canvas) => { canvas.direct(way, canvas === this.main ? this.other : this.graph); });
    this.marked();
    this.each((canvas) => { canvas.draw(); canvas.view.fit(true); });
    this.selected(this.main, null);
  }

  color(name) {
    this.colorChoice.value = name;
    this.each((canvas, n) => {
      canvas.measure = this.measures[this.canvases.indexOf(canvas)].get(name) || null;
      canvas.sums();
    });
    this.each((canvas) => { if (canvas.places) canvas.colorBoxes(); canvas.minimap.draw(); });
    this.drawLegend();
    this.changed(this.main);
  }

  drawLegend() {
    const {main} = this, {measure} = main;
    const parts = [];
    if (measure) {
      const steps = Array.from({length: lib.LEVELS}, (_, n) => make("i", `heat-${n + 1}`));
      parts.push(make("span", "", "0"), make("span", "steps", ...steps),
        make("span", "", `${lib.shown(main.most, measure.unit)} in the largest visible box`));
    } else {
      lib.FAMILIES.forEach(([name], n) => {
        if (main.families.has(n + 1)) parts.push(make("span", "", make("i", `family-${n + 1}`), name));
      });
    }
    if (this.canvases.length > 1)
      parts.push(make("span", "", make("i", "only"), "on one side only"),
                 make("span", "", make("i", "differs"), "differs"));
    this.legend.replaceChildren(...parts);
  }

  // Details.

  selected(canvas, box) {
    this.linked(canvas, (other) => {
      const twin = box && other.tree.boxes.get(box.id);
      other.select(twin || null);
    });
    if (this.linking) return;
    if (!box) {
      this.panel.replaceChildren(make("p", "dim",
        "Click a box for its details; double-click, or + in its corner, unfolds it. "),
        make("p", "dim", "Keys: arrows go to neighbours, Enter unfolds, Escape folds, / searches, + − 0 zoom."));
      return;
    }
    const number = this.canvases.indexOf(canvas);
    this.panel.replaceChildren(
      ...lib.detailsOf(canvas, box, this.measures[number], (index) => this.reveal(index, canvas)),
      ...this.differences(box));
    this.panel.scrollTop = 0;
  }

  // Go to a node, in the direction in which it is.
  reveal(index, canvas = this.main, focus = true) {
    const node = canvas.graph.nodes[index];
    if (!canvas.tree.leafOf.has(index) && lib.isOp(node)) {
      this.directionChoice.value = "both";
      this.direct("both");
    }
    const box = canvas.tree.leafOf.get(index);
    if (box) canvas.reveal(box);
    else {
      // Parameters and constants have no box.
      canvas.select(null, false);
      this.panel.replaceChildren(...lib.detailsOf(canvas, {index, children: null}, new Map(),
        (other) => this.reveal(other, canvas)));
      this.panel.scrollTop = 0;
    }
    if (focus) this.panel.focus({preventScroll: true});
  }

  // Search.

  find() {
    const query = this.search.value.trim();
    const found = query ? this.index.find(query) : null;
    this.each((canvas) => canvas.highlight(canvas === this.main ? found
      : query ? canvas.index.find(query) : null));
    this.results.hidden = !found;
    this.found.textContent = found ? lib.counted(found.length, "result") : "";
    this.results.replaceChildren(...(found || []).slice(0, MOST_RESULTS).map((index) => {
      const node = this.graph.nodes[index];
      const row = button("", "", () => this.reveal(index));
      row.dataset.index = index;
      row.append(make("span", "kind", lib.kindOf(node)), make("span", "name", node.name));
      lib.counts.drawn += 4;  // With the item of the list.
      return make("li", "", row);
    }));
    if (found && found.length > MOST_RESULTS)
      this.results.append(make("li", "dim", `and ${found.length - MOST_RESULTS} more`));
  }

  listen() {
    this.search.addEventListener("input", () => this.find());
    for (const part of [this.search, this.results]) part.addEventListener("keydown", (event) => {
      const rows = [...this.results.querySelectorAll("button")];
      const at = rows.indexOf(document.activeElement);
      const go = {
        Escape: () => { this.search.value = ""; this.find(); this.main.activate(this.main.active); },
        Enter: at < 0 && rows.length ? () => rows[0].click() : null,
        ArrowDown: () => rows[at + 1]?.focus(),
        ArrowUp: () => (at > 0 ? rows[at - 1] : this.search).focus(),
      }[event.key];
      if (!go) return;
      event.preventDefault();
      go();
    });
    (this.own ? document : this.host).addEventListener("keydown", (event) => {
      if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
        event.preventDefault();
        this.search.focus();
        this.search.select();
      }
    });
    this.exportChoice.addEventListener("change", () => {
      this.save(this.exportChoice.value);
      this.exportChoice.value = "";
    });
    this.file.addEventListener("change", () => this.read());
    new ResizeObserver(() => this.each((canvas) => {
      if (!canvas.places || this.printing) return;
      canvas.view.set(canvas.view.x, canvas.view.y, canvas.view.scale, false);
      canvas.minimap.draw();
    })).observe(this.stage);
    amanda.onColors(() => this.each((canvas) => { if (canvas.places) { canvas.colorBoxes(); canvas.minimap.draw(); } }));
    // Paper gets the whole drawing.
    addEventListener("beforeprint", () => {
      this.printing = true;
      this.each(({svg, view: {bounds}}) =>
        svg.setAttribute("viewBox", `-4 -4 ${bounds.width + 8} ${bounds.height + 8}`));
    });
    addEventListener("afterprint", () => {
      this.printing = false;
      this.each(({view}) => view.set(view.x, view.y, view.scale, false));
    });
  }

  // Files.

  save(form) {
    const name = `graph-${this.graph.namespace.replace(/[^\w.-]+/g, "-")}`;
    if (form === "SVG")
      lib.save(new Blob([lib.svgText(this.main).text], {type: "image/svg+xml"}), `${name}.svg`);
    if (form === "PNG")
      lib.pngOf(this.main, (blob) => {
        if (blob) lib.save(blob, `${name}.png`);
        else this.say("The browser cannot make a picture of this size; save an SVG file");
      });
  }

  // Side by side.

  compare(which) {
    if (which === "file") {
      this.compareChoice.value = "";
      this.file.click();
      return;
    }
    this.beside(which === "" ? null : which === "loaded" ? this.loaded : this.graphs[which]);
  }

  async read() {
    const [file] = this.file.files;
    if (!file) return;
    try {
      const graphs = lib.fromFile(JSON.parse(await file.text()));
      const same = graphs.find((one) => one.namespace === this.graph.namespace);
      const most = graphs.reduce((best, one) => one.nodes.length > best.nodes.length ? one : best, graphs[0]);
      if (!most) throw new Error("The file has no graphs");
      this.loaded = same || most;
      this.compareChoice.querySelector("[value=loaded]")?.remove();
      this.compareChoice.append(new Option(file.name, "loaded"));
      this.compareChoice.value = "loaded";
      this.beside(this.loaded);
      this.say(`Beside it: ${file.name}`);
    } catch (error) {
      this.say(`${file.name} cannot be shown. ${error.message}`);
    }
    this.file.value = "";
  }

  // Show another graph beside the first; null for none.
  beside(graph) {
    this.canvases.length = 1;
    while (this.stage.children.length > 1) this.stage.lastChild.remove();
    this.other = graph;
    const {main} = this, way = this.directionChoice.value;
    const unfolded = [...main.fold.unfolded].map((box) => box.id);
    const selected = main.selected && main.selected.id;
    main.direct(way, graph);
    if (graph) {
      const canvas = this.addCanvas(graph);
      canvas.index = new lib.Search(graph, lib.counts);
      canvas.direct(way, this.graph);
    }
    this.each(({fold, tree}) => {
      fold.foldAll();
      for (const id of unfolded) {
        const box = tree.boxes.get(id);
        if (box && box.children) fold.unfold(box);
      }
    });
    this.measured();
    this.marked();
    this.color(this.colorChoice.value);
    this.each((canvas) => { canvas.draw(); });
    main.view.fit(true);
    main.select(selected ? main.tree.boxes.get(selected) || null : null);
    this.drawLegend();
  }

  // Note what differs: boxes that only one side has, and those whose operators or shapes differ.
  marked() {
    const [main, other] = this.canvases;
    main.differs = other ? new Map() : null;
    if (!other) return;
    other.differs = new Map();
    for (const [one, two] of [[main, other], [other, main]]) {
      const sign = (canvas, leaf) => lib.signOf(canvas.graph.nodes[leaf.index]);
      const sums = [0];  // Of leaves that the other side has not, or not so.
      for (const leaf of one.tree.leaves) {
        const twin = two.tree.boxes.get(leaf.id);
        const same = twin && !twin.children && sign(one, leaf) === sign(two, twin);
        sums.push(sums[sums.length - 1] + Number(!same));
      }
      for (const [id, box] of one.tree.boxes) {
        const twin = two.tree.boxes.get(id);
        if (!twin) one.differs.set(id, "only");
        else if (sums[box.high] > sums[box.low] || box.high - box.low !== twin.high - twin.low)
          one.differs.set(id, "differs");
      }
    }
  }

  differences(box) {
    const [main, other] = this.canvases;
    if (!other) return [];
    const one = main.tree.boxes.get(box.id), two = other.tree.boxes.get(box.id);
    const rows = [...this.measures[0].values()].map((measure) => {
      const second = this.measures[1].get(measure.name);
      const sum = (canvas, of, at) => at && of ? lib.summed(canvas.graph, canvas.tree, of)(at) : null;
      const values = [sum(main, measure, one), sum(other, second, two)];
      const text = (value) => value === null ? "-" : lib.shown(value, measure.unit);
      const change = values[0] === values[1] ? "same" : values[0] && values[1] !== null
        ? `${values[1] >= values[0] ? "+" : ""}${Number((100 * (values[1] / values[0] - 1)).toPrecision(3))} %` : "";
      return [make("span", "dim", measure.name),
              ...[...values.map(text), change].map((one) => make("span", "figure", one))];
    });
    const table = make("table", "sides", make("thead", "", make("tr", "", ...["", "left", "right", "change"]
      .map((text) => make("th", "", text)))),
      make("tbody", "", ...rows.map((cells) => make("tr", "", ...cells.map((cell) => make("td", "", cell))))));
    const say = !one || !two ? "Only one side has it."
      : main.differs.get(box.id) ? "Its operators or their shapes differ." : "";
    return [make("h3", "", "Both sides"), say ? make("p", "", say) : null, make("div", "scroll", table)]
      .filter((part) => part);
  }

  // The link to a place.

  changed(canvas) {
    this.linked(canvas, (other) => {
      if (canvas.places && other.places) this.follow(canvas, other);
    });
    if (!this.own || this.restoring || this.waiting || !this.main) return;
    this.waiting = setTimeout(() => {
      this.waiting = null;
      this.write();
    }, 400);  // Browsers refuse more than some hundred changes of the address a minute.
  }

  // Show in one canvas what the other shows: what is selected, or else what both have nearest to the
  // middle, is at one place.
  follow(canvas, other) {
    const {x, y, scale, size} = canvas.view;
    const middle = (place) => [place.x + place.width / 2, place.y + (place.level ? 0 : place.height / 2)];
    let least = Infinity, move = [0, 0];
    for (const place of canvas.places.values()) {
      const twin = other.tree.boxes.get(place.box.id), there = twin && other.places.get(twin);
      if (!there || Boolean(there.level) !== Boolean(place.level)) continue;
      const [a, b] = middle(place), [c, d] = middle(there);
      const hidden = a < x || b < y || a > x + size.width / scale || b > y + size.height / scale;
      if (hidden && least < Infinity) continue;
      const far = place.box === canvas.selected ? 0 : 1 + Math.hypot(a - x - size.width / scale / 2, b - y - size.height / scale / 2);
      if (far < least) { least = far; move = [c - a, d - b]; }
    }
    other.view.set(x + move[0], y + move[1], scale);
  }

  write() {
    const {main} = this, {view} = main;
    this.written = lib.textOf({
      graph: this.graphs.length > 1 ? this.number : null, direction: main.direction,
      color: this.colorChoice.value, select: main.selected && main.selected.id,
      unfolded: [...main.fold.unfolded].map((box) => box.id),
      view: [view.x.toFixed(0), view.y.toFixed(0), view.scale.toFixed(3)].join()});
    try { history.replaceState(null, "", "#" + this.written); } catch { /* A page without an address. */ }
  }

  go(place) {
    const {main} = this;
    this.restoring = true;
    if (place.direction && place.direction !== main.direction &&
        DIRECTIONS.some(([way]) => way === place.direction)) {
      this.directionChoice.value = place.direction;
      main.direct(place.direction);
    }
    if (place.any) {
      main.fold.foldAll();
      for (const id of place.unfolded) {
        const box = main.tree.boxes.get(id);
        if (box && box.children) main.fold.unfold(box);
      }
      main.layout.levels.clear();
    }
    const color = place.color !== null ? place.color : this.colorChoice.value;
    main.measure = this.measures[0].get(color) || null;
    this.colorChoice.value = main.measure ? color : "";
    main.sums();
    main.draw();
    main.view.fit(true);
    if (place.view) main.view.set(...place.view);
    const box = place.select && main.tree.boxes.get(place.select);
    main.select(box || null);
    this.drawLegend();
    this.restoring = false;
  }
}

lib.mount = (host, graphs, own = false) => new Page(host, graphs, own);
// The charts of other pages: `context.result` is the content of graph.json.
amanda.charts.graph = (host, chart, context) => {
  const page = lib.mount(host, lib.fromFile(context.result));
  return {
    select(op) {
      const index = page.graph.nodes.findIndex((node) => lib.isOp(node) && node.name === op.name);
      if (index >= 0) page.reveal(index, page.main, false);
    },
  };
};
const body = document.getElementById("graph-page");
if (body)
  amanda.ready(() => { lib.page = lib.mount(body, amanda.data("graphs").map(lib.unpacked), true); });
})();

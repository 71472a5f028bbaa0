"use strict";
(() => {
  const {make, quantity: scaled} = amanda;
  const graphs = amanda.data("graphs");
  const byId = (id) => document.getElementById(id);
  const tree = byId("tree"), details = byId("details"), search = byId("search");
  const SVG = "http://www.w3.org/2000/svg";
  const BYTES = {bool: 1, int4: .5, uint4: .5, bfloat16: 2, half: 2, float: 4, double: 8};
  let graph, root, into, from, backwardOf, chosen = null, active = null;

  // Facts.

  const isOp = (node) => node.node === "op";
  const kindOf = (node) => isOp(node) ? node.word || node.type : node.kind;
  const text = (tensor) => {
    if (tensor === null || tensor === undefined) return "";
    if (Array.isArray(tensor)) return "(" + tensor.map(text).join(", ") + ")";
    const sizes = tensor.shape === null ? "..." : tensor.shape.map((n) => n === null ? "?" : n);
    return tensor.dtype + "[" + sizes + "]";
  };
  const bytesOf = (tensor) => {
    if (tensor === null || tensor === undefined) return 0;
    if (Array.isArray(tensor)) return tensor.reduce((sum, one) => sum + bytesOf(one), 0);
    if (tensor.shape === null || tensor.shape.includes(null)) return 0;
    const bits = /(\d+)/.exec(tensor.dtype);
    const each = BYTES[tensor.dtype] || (bits ? Number(bits[1]) / 8 : 0);
    return tensor.shape.reduce((product, n) => product * n, each);
  };
  // The name of a figure ends with its unit.
  const unitOf = (name) => (/ \(([^()]+)\)$/.exec(name) || ["", ""])[1];
  const plain = (name) => name.replace(/ \([^()]+\)$/, "");
  const counted = (number) => number === 1 ? "1 operator" : `${number} operators`;
  const measures = {
    "size of outputs": {of: (op) => bytesOf(op.outputs), unit: "B"},
    "executions": {of: (op) => op.executions || 0, unit: ""},
  };
  const measure = () => measures[byId("measure").value];

  // The tree: modules with operators and modules inside, in order of first execution.

  const choose = (number) => {
    graph = graphs[number];
    into = graph.nodes.map(() => []);
    from = graph.nodes.map(() => []);
    backwardOf = graph.nodes.map(() => []);
    for (const edge of graph.edges) {
      into[edge.consumer].push(edge);
      from[edge.producer].push(edge);
    }
    for (const edges of into) edges.sort((a, b) => a.input - b.input || a.item - b.item);
    const noted = new Set();
    for (const op of graph.nodes.filter(isOp)) {
      if (op.forward !== null) backwardOf[op.forward].push(op);
      for (const [name, value] of Object.entries(op.notes))
        if (typeof value === "number") noted.add(name);
    }
    for (const name of Object.keys(measures).slice(2)) delete measures[name];  // Of another graph.
    for (const name of noted)
      measures[plain(name)] = {of: (op) => Number(op.notes[name]) || 0, unit: unitOf(name)};
    const old = byId("measure").value;
    byId("measure").replaceChildren(...[...Object.keys(measures)].map((name) => new Option(name)));
    if (old in measures) byId("measure").value = old;
    const forward = graph.nodes.filter((node) => isOp(node) && !node.is_backward);
    const backward = graph.nodes.filter((node) => isOp(node) && node.is_backward);
    byId("title").textContent =
      `${graph.namespace}: ${counted(forward.length)}, ${backward.length} backward`;
    document.title = `Graph of ${graph.namespace}`;
    byId("backward").checked = forward.length === 0;
    plant(forward.length + backward.length < 40);
    show(null);
  };

  const plant = (all) => {
    root = {name: graph.namespace, path: "", entries: [], modules: new Map(), ops: []};
    for (const op of graph.nodes) {
      if (!isOp(op) || (op.is_backward && !byId("backward").checked)) continue;
      const home = op.forward === null ? op : graph.nodes[op.forward];
      let module = root;
      module.ops.push(op);
      for (const part of home.module.split(/[./]/).filter((name) => name !== "")) {
        if (!module.modules.has(part)) {
          const child = {name: part, path: module.path ? module.path + "." + part : part,
                         entries: [], modules: new Map(), ops: []};
          module.modules.set(part, child);
          module.entries.push(child);
        }
        module = module.modules.get(part);
        module.ops.push(op);
      }
      module.entries.push(op);
    }
    draw(all);
  };

  const draw = (all) => {
    active = null;
    const words = search.value.toLowerCase().split(/\s+/).filter((word) => word);
    if (words.length) {
      const found = root.ops.filter((op) => {
        const facts = [op.name, op.type, op.word, op.module, op.source, op.id].join("\n");
        return words.every((word) => facts.toLowerCase().includes(word));
      });
      byId("found").textContent = counted(found.length);
      tree.replaceChildren(...found.map((op) => row(op, 0, largest(root))));
    } else {
      byId("found").textContent = "";
      tree.replaceChildren(row(root, 0, largest(root)));
      const open = (item, depth) => {
        if (!item.entry.entries || !(all || depth > 0)) return;
        toggle(item, true);
        for (const child of item.lastChild.children) open(child, depth - 1);
      };
      // As many levels as fit a screen.
      let depth = 1, seen = root.entries.length, level = root.entries;
      while (seen < 40 && level.some((entry) => entry.entries)) {
        level = level.flatMap((entry) => entry.entries || []);
        seen += level.length;
        if (seen < 40) depth += 1;
      }
      open(tree.firstChild, depth);
    }
    if (tree.firstChild) activate(tree.firstChild, false);
  };

  const sum = (entry) =>
    entry.entries ? entry.ops.reduce((total, op) => total + measure().of(op), 0) : measure().of(entry);
  const largest = (entry) => Math.max(1e-30, sum(entry));

  const row = (entry, depth, total) => {
    const line = make("div", "row", make("span", "mark"));
    line.style.setProperty("--depth", depth);
    if (entry.entries) {
      line.append(make("span", "name module", entry.name || "(program)"));
      line.append(make("span", "count", counted(entry.ops.length)));
    } else {
      const name = search.value ? entry.name : entry.name.replace(/^.*\//, "");
      line.append(make("span", "type" + (entry.is_backward ? " backward" : ""), kindOf(entry)));
      line.append(make("span", "name", name));
      line.append(make("span", "shape", entry.outputs.map(text).filter((one) => one).join(" ")));
    }
    const amount = sum(entry), bar = make("i");
    bar.style.width = `${3 * amount / total}rem`;
    if (amount)
      line.append(make("span", "bar", bar, make("span", "", scaled(amount, measure().unit))));
    const item = make("li", "", line);
    item.setAttribute("role", "treeitem");
    item.setAttribute("aria-level", depth + 1);
    item.tabIndex = -1;
    item.entry = entry;
    item.depth = depth;
    item.total = total;
    if (entry.entries) item.setAttribute("aria-expanded", "false");
    else {
      item.dataset.index = entry.index;
      item.setAttribute("aria-selected", String(entry.index === chosen));
    }
    return item;
  };

  const toggle = (item, open) => {
    if (!item.entry.entries || (item.getAttribute("aria-expanded") === "true") === open) return;
    item.setAttribute("aria-expanded", String(open));
    if (open) {
      const children = item.entry.entries.map((entry) => row(entry, item.depth + 1, item.total));
      const list = make("ul", "", ...children);
      list.setAttribute("role", "group");
      item.append(list);
    } else item.lastChild.remove();
  };

  const activate = (item, focus = true) => {
    if (active) active.tabIndex = -1;
    active = item;
    item.tabIndex = 0;
    if (focus) item.focus();
  };

  const use = (item) => {
    activate(item);
    if (item.entry.entries) toggle(item, item.getAttribute("aria-expanded") !== "true");
    else show(item.entry.index);
  };

  tree.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) use(item);
  });
  tree.addEventListener("keydown", (event) => {
    const items = [...tree.querySelectorAll("li")], at = items.indexOf(active);
    const parent = active && active.parentElement.closest("li");
    const is = active && active.getAttribute("aria-expanded");
    const go = {
      ArrowDown: () => items[at + 1] && activate(items[at + 1]),
      ArrowUp: () => items[at - 1] && activate(items[at - 1]),
      Home: () => activate(items[0]),
      End: () => activate(items[items.length - 1]),
      ArrowRight: () => is === "false" ? toggle(active, true) : is && activate(items[at + 1]),
      ArrowLeft: () => is === "true" ? toggle(active, false) : parent && activate(parent),
      Enter: () => use(active),
      " ": () => use(active),
    }[event.key];
    if (!go || at < 0) return;
    event.preventDefault();
    go();
  });

  // Details of one node.

  const link = (node) => {
    const button = make("button", "link", node.name);
    button.type = "button";
    button.addEventListener("click", () => reveal(node.index));
    return make("span", "", button, make("span", "dim", " " + kindOf(node)));
  };
  const table = (heads, rows) => {
    const cells = (tag, values) => make("tr", "", ...values.map((value) => make(tag, "", value)));
    return make("table", "", make("thead", "", cells("th", heads)),
                make("tbody", "", ...rows.map((values) => cells("td", values))));
  };
  const section = (title, content) => [make("h3", "", title), content];
  const several = (parts) => make("div", "", ...parts.map((part) => make("div", "", part)));
  const size = (tensor) => { const found = bytesOf(tensor); return found ? scaled(found, "B") : ""; };

  const passes = (edge, node) => {
    const facts = [];
    if (edge.item !== null) facts.push(`item ${edge.item}`);
    if (edge.output) facts.push(`output ${edge.output}`);
    if (edge.output === null) facts.push("written in place");
    if (edge.kind === "alias") facts.push("through shared memory");
    if (edge.back) facts.push("of an earlier execution");
    else if (edge.first) facts.push(`from execution ${edge.first} on`);
    return make("span", "", link(node),
                facts.length ? make("span", "dim", ` (${facts.join(", ")})`) : null);
  };

  const show = (index) => {
    chosen = index;
    for (const item of tree.querySelectorAll("[data-index]"))
      item.setAttribute("aria-selected", String(Number(item.dataset.index) === index));
    if (index === null) {
      details.replaceChildren(make("p", "dim", "Choose an operator on the left, or search."));
      return;
    }
    const node = graph.nodes[index];
    const broken = node.name.split(/(?<=[./])/).flatMap((part) => [part, make("wbr")]);
    const parts = [make("h2", "", ...broken), picture(node)];
    const facts = isOp(node)
      ? [["type", node.type], ["common word", node.word], ["module", node.module],
         ["source", node.source], ["program", node.program], ["zone", node.zone],
         ["executions", node.executions], ["id", node.id]]
      : [["kind", node.kind], ["tensor", text(node.tensor)], ["size", size(node.tensor)],
         ["program", node.program]];
    const known = facts.filter(([, value]) => value !== null && value !== "");
    parts.push(table(["", ""], known.map(([name, value]) => [make("span", "dim", name), make("code", "", String(value))])));
    if (isOp(node)) {
      const notes = Object.entries(node.notes).filter(([, value]) => value !== null);
      if (notes.length)
        parts.push(...section("Notes of other tools",
          table(["", ""], notes.map(([name, value]) => [make("span", "dim", plain(name)),
            typeof value === "number" ? scaled(value, unitOf(name)) : String(value)]))));
      const ends = (edges, position, end) => several(edges
        .filter((edge) => edge[end === "producer" ? "input" : "output"] === position)
        .map((edge) => passes(edge, graph.nodes[edge[end]])));
      parts.push(...section("Inputs", table(["", "tensor", "size", "from"],
        node.inputs.map((tensor, n) => [tensor, n]).filter(([tensor]) => tensor !== null)
          .map(([tensor, n]) => [node.input_names[n] || String(n), make("code", "", text(tensor)),
                                 size(tensor), ends(into[index], n, "producer")]))));
      parts.push(...section("Outputs", table(["", "tensor", "size", "to"],
        node.outputs.map((tensor, n) => [String(n), make("code", "", text(tensor)), size(tensor),
                                         ends(from[index], n, "consumer")]))));
      const others = Object.entries(node.arguments);
      if (others.length)
        parts.push(...section("Arguments", table(["", ""],
          others.map(([name, value]) => [make("span", "dim", name), make("code", "", value)]))));
      if (node.forward !== null)
        parts.push(...section("Gradient of", link(graph.nodes[node.forward])));
      if (backwardOf[index].length)
        parts.push(...section("Backward operators", several(backwardOf[index].map(link))));
    } else
      parts.push(...section("Read by",
        several(from[index].map((edge) => passes(edge, graph.nodes[edge.consumer])))));
    details.replaceChildren(...parts);
    details.scrollTop = 0;
  };

  // A node with its neighbours, what goes in above and what comes out below.

  const picture = (node) => {
    const once = (indices) => [...new Set(indices)].map((index) => graph.nodes[index]);
    const above = once(into[node.index].map((edge) => edge.producer));
    const below = once(from[node.index].map((edge) => edge.consumer));
    const limit = 6, width = 150, height = 40, gap = 16, step = 84;
    const place = (nodes) => {
      const shown = nodes.slice(0, nodes.length > limit ? limit - 1 : limit);
      return nodes.length > limit ? [...shown, {more: nodes.length - shown.length}] : shown;
    };
    const rows = [place(above), [node], place(below)].filter((nodes) => nodes.length);
    const full = Math.max(...rows.map((nodes) => nodes.length)) * (width + gap) + gap;
    const svg = document.createElementNS(SVG, "svg");
    const add = (parent, tag, attributes, content) => {
      const element = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      if (content !== undefined) element.textContent = content;
      return parent.appendChild(element);
    };
    const total = rows.length * step - step + height + 8;
    for (const [name, value] of Object.entries({viewBox: `0 0 ${full} ${total}`, width: full,
                                                height: total, role: "img"}))
      svg.setAttribute(name, value);
    svg.setAttribute("aria-label", `${node.name} and its neighbours`);
    const head = add(add(svg, "defs", {}), "marker", {id: "head", viewBox: "0 0 8 8", refX: 7,
      refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto"});
    add(head, "path", {d: "M0 0 L8 4 L0 8 z"});
    const own = rows.findIndex((nodes) => nodes[0] === node && nodes.length === 1);
    const middle = (nodes, n) => (full - nodes.length * (width + gap)) / 2 + (width + gap) * (n + .5);
    const cut = (name) => name.length > 22 ? "…" + name.slice(-21) : name;
    rows.forEach((nodes, level) => nodes.forEach((one, n) => {
      const x = middle(nodes, n), y = 4 + level * step;
      if (level !== own) {
        const at = full / 2, to = 4 + own * step;
        const d = level < own ? `M${x} ${y + height} L${at} ${to}` : `M${at} ${to + height} L${x} ${y}`;
        add(svg, "path", {d, "marker-end": "url(#head)"});
      }
      const group = add(svg, "g", {class: level === own ? "self" : one.node || "more"});
      add(group, "rect", {x: x - width / 2, y, width, height, rx: 6});
      if (one.more) {
        add(group, "text", {x, y: y + 25}, `${one.more} more`);
        return;
      }
      add(group, "title", {}, `${one.name}\n${isOp(one) ? one.outputs.map(text).join(" ") : text(one.tensor)}`);
      add(group, "text", {x, y: y + 17, "font-weight": 600}, cut(kindOf(one)));
      add(group, "text", {x, y: y + 32}, cut(one.name));
      group.dataset.index = one.index;
      group.addEventListener("click", () => reveal(one.index));
    }));
    return svg;
  };

  // Show a node, opening the modules that it is in.
  const reveal = (index) => {
    const node = graph.nodes[index];
    if (isOp(node)) {
      if (node.is_backward && !byId("backward").checked) {
        byId("backward").checked = true;
        plant(false);
      }
      if (search.value && !tree.querySelector(`[data-index="${index}"]`)) {
        search.value = "";
        draw(false);
      }
      let items = [...tree.children];
      for (let item; (item = items.find((one) => one.entry.entries && one.entry.ops.includes(node)));) {
        toggle(item, true);
        items = [...item.lastChild.children];
      }
      const item = tree.querySelector(`[data-index="${index}"]`);
      if (item) {
        activate(item, false);
        item.scrollIntoView({block: "nearest"});
      }
    }
    show(index);
    details.focus({preventScroll: true});
  };

  search.addEventListener("input", () => draw(false));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { search.value = ""; draw(false); }
    if (event.key === "Enter" || event.key === "ArrowDown") {
      const first = tree.querySelector("li");
      if (!first) return;
      event.preventDefault();
      if (event.key === "Enter" && !first.entry.entries) use(first); else activate(first);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== search) { event.preventDefault(); search.focus(); }
  });
  byId("measure").addEventListener("change", () => draw(false));
  byId("backward").addEventListener("change", () => plant(false));
  byId("open-all").addEventListener("click", () => draw(true));
  byId("close-all").addEventListener("click", () => {
    search.value = "";
    draw(false);
    for (const item of [...tree.querySelectorAll("li[aria-expanded=true]")].reverse())
      if (item.depth > 0) toggle(item, false);
  });
  byId("graph").append(...graphs.map((one, n) => new Option(one.namespace, n)));
  byId("graph-label").hidden = graphs.length < 2;
  byId("graph").addEventListener("change", (event) => choose(Number(event.target.value)));
  // The largest first, as most have a few operators in another mode.
  const most = graphs.reduce((best, one, n) =>
    one.nodes.length > graphs[best].nodes.length ? n : best, 0);
  byId("graph").value = most;
  if (graphs.length) choose(most);
  else byId("title").textContent = "No operators were seen";
})();

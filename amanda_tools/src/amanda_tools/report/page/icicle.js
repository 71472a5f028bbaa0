"use strict";
// Figures of operators by module, as boxes below that of the module around them. Choosing a module
// shows it at full width.
amanda.charts.icicle = (host, chart, context) => {
  const {rows} = amanda, ROW = 26;
  // Where operators that are in no module stand, by what the program does there.
  const ZONES = {init: "(building)", optimizer: "(optimizer)"};
  const measures = rows.measures(context.result, chart);
  const found = rows.of(context.result, chart.part);
  const more = chart.rest ? Object.entries(context.result[chart.rest.part]) : [];
  const trail = amanda.make("p", "trail"), bar = amanda.make("div", "choices");
  host.append(bar, trail);
  let measure, root, shown, cursor, boxes = [], drawn = null;

  const node = (name, path, parent) =>
    ({name, path, parent, children: [], modules: new Map(), size: 0, op: null});
  const home = (path) => {
    let module = root;
    for (const part of path.split(/[./]/).filter((text) => text !== "")) {
      if (!module.modules.has(part)) {
        const child = node(part, module.path ? `${module.path}.${part}` : part, module);
        module.modules.set(part, child);
        module.children.push(child);
      }
      module = module.modules.get(part);
    }
    return module;
  };
  const leaf = (path, name, size, op) => {
    const parent = home(path), one = node(name, name, parent);
    Object.assign(one, {size, op});
    parent.children.push(one);
    for (let above = parent; above; above = above.parent) above.size += size;
  };
  // A module with nothing but one module inside is one box with it.
  const joined = (one) => {
    const [only] = one.children;
    if (one.children.length === 1 && !only.op && only.children.length) {
      const both = joined({...only, name: `${one.name}.${only.name}`, parent: one.parent});
      for (const child of both.children) child.parent = both;
      return both;
    }
    one.children = one.children.map(joined);
    return one;
  };
  const plant = () => {
    root = node(chart.root || "the program", "", null);
    for (const row of found) {
      const size = measure.values.reduce((sum, one) => sum + (rows.number(row, one) || 0), 0);
      if (size > 0) leaf(row.module || ZONES[row.zone] || "", row.name, size, row);
    }
    if (chart.rest && (!chart.rest.of || chart.rest.of === measure.label))
      for (const [path, size] of more) if (size > 0) leaf(path, chart.rest.label, size, null);
    const sort = (one) => {
      one.children.sort((a, b) => b.size - a.size);
      one.children.forEach(sort);
    };
    sort(root);
    root.children = root.children.map(joined);
    // The colours are those of the first modules of which none has nearly everything.
    let top = root;
    while (top.children.length && top.children[0].size > .6 * root.size && top.children[0].children.length)
      top = top.children[0];
    const paint = (one, hue) => {
      one.hue = hue;
      one.children.forEach((child, n) => paint(child, one === top ? n % 8 : hue));
    };
    paint(root, 7);
    show(root);
  };

  const lay = () => {
    boxes = [];
    const above = [];
    for (let one = shown.parent; one; one = one.parent) above.unshift(one);
    above.forEach((one, depth) => boxes.push({one, depth, from: 0, to: shown.size}));
    const place = (one, depth, from) => {
      boxes.push({one, depth, from, to: from + one.size});
      let at = from;
      for (const child of one.children) {
        // What is narrower than a third of a pixel is not seen.
        if (child.size * 3000 > shown.size) place(child, depth + 1, at);
        at += child.size;
      }
    };
    place(shown, above.length, 0);
  };
  // Without the modules that are above it anyway; a number needs the one around it.
  const short = (one) => one.op ? one.name.replace(/^.*\//, "")
    : /^\d+(\.|$)/.test(one.name) && one.parent.parent
      ? `${one.parent.name.split(".").pop()}.${one.name}` : one.name;
  const share = (one) => rows.percent(one.size / root.size);
  const text = (one) => `${one.path || one.name}\n${amanda.quantity(one.size, measure.unit)}, ` +
    `${share(one)} of all`;
  const use = (one) => { if (one.op) context.select(one.op); else if (one.children.length) show(one); };

  const option = () => {
    const colors = amanda.categories(), ink = amanda.color("--text"), back = amanda.color("--back");
    const accent = amanda.color("--accent");
    return {
      grid: {left: 0, right: 0, top: 0, bottom: 0},
      xAxis: {type: "value", show: false, min: 0, max: shown.size},
      yAxis: {type: "value", show: false, inverse: true, min: 0, max: depths()},
      series: [{
        type: "custom", clip: true, animation: false, encode: {x: [0, 1], y: 2},
        data: boxes.map((box) => [box.from, box.to, box.depth]),
        renderItem: (params, api) => {
          const box = boxes[params.dataIndex];
          if (!box) return null;  // Of the boxes before the last choice.
          const one = box.one;
          const [x, y] = api.coord([box.from, box.depth]), [to] = api.coord([box.to, box.depth]);
          const wide = to - x, held = one === cursor;
          return {
            type: "rect", shape: {x, y: y + 1, width: Math.max(wide - 1, .5), height: ROW - 2, r: 2},
            style: {fill: colors[one.hue], opacity: one.op || !one.children.length ? .3 : .55,
                    stroke: held ? accent : back, lineWidth: held ? 2.5 : 0},
            // Widths of texts are estimated, up to a tenth too small.
            textContent: wide < 46 ? undefined : {style: {
              text: short(one), fill: ink, overflow: "truncate", width: .85 * (wide - 12), ellipsis: "…",
              font: `${one.op ? 400 : 600} 12px system-ui, sans-serif`}},
            textConfig: {position: "insideLeft", distance: 5},
            emphasis: {style: {opacity: .8}},
          };
        },
      }],
      tooltip: {...amanda.frame.tooltip(), formatter: (params) => {
        const box = boxes[params.dataIndex];
        return box ? text(box.one) : "";
      }},
    };
  };
  const depths = () => Math.max(...boxes.map((box) => box.depth)) + 1;

  const show = (one) => {
    shown = one;
    cursor = null;
    lay();
    const path = [];
    for (let at = one; at; at = at.parent) path.unshift(at);
    trail.replaceChildren(...path.flatMap((at, n) => {
      const button = amanda.make("button", "link", at.name);
      button.type = "button";
      button.disabled = at === one;
      button.addEventListener("click", () => show(at));
      return n ? [" / ", button] : [button];
    }), amanda.make("span", "dim", `  ${amanda.quantity(one.size, measure.unit)}, ${share(one)}`));
    if (drawn) drawn.repaint();
  };
  // By keyboard: to the modules around and inside, and to those beside.
  const move = (to) => (said) => {
    const from = cursor || shown;
    const beside = from.parent ? from.parent.children : [from], n = beside.indexOf(from);
    const next = {in: from.children[0], out: from.parent, left: beside[n - 1], right: beside[n + 1]}[to];
    if (!next || (to === "out" && !cursor)) return;
    cursor = next;
    said.textContent = text(cursor).replace("\n", ": ");
    drawn.repaint();
  };

  amanda.frame.choice(bar, "Show", measures.map((one) => one.label), (n) => {
    measure = measures[n];
    plant();
  });
  if (!root.size) {
    host.replaceChildren(amanda.make("p", "dim", "Nothing was measured."));
    return {};
  }
  drawn = amanda.frame.draw(host, {
    height: () => ROW * depths(), option, label: `${chart.title}: ${text(root).replace("\n", ", ")}`,
    keys: {
      ArrowDown: move("in"), ArrowUp: move("out"), ArrowLeft: move("left"),
      ArrowRight: move("right"), Enter: () => use(cursor || shown),
      Escape: () => shown.parent && show(shown.parent),
    },
  });
  drawn.chart.on("click", (params) => use(boxes[params.dataIndex].one));
  return drawn;
};

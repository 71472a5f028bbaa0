"use strict";
// The frame of a chart: ECharts with the page's colours, its size, and use by keyboard. Tooltips
// are drawn on the canvas, since the page's policy refuses the markup of others.
amanda.frame = (() => {
  const FONT = "system-ui, sans-serif", SIZE = 12, LINE = 18, GAP = 10;
  const pen = document.createElement("canvas").getContext("2d");
  const common = () => ({
    animation: !matchMedia("(prefers-reduced-motion: reduce)").matches, animationDuration: 250,
    color: amanda.categories(),
    textStyle: {color: amanda.color("--text"), fontFamily: FONT, fontSize: SIZE},
  });
  // Marks that are told apart without colours.
  const SHAPES = ["circle", "triangle", "rect", "diamond", "path://M0,0L10,0L5,9Z"];
  const tooltip = () => ({
    renderMode: "richText", confine: true, backgroundColor: amanda.color("--back"),
    borderColor: amanda.color("--line"), padding: [8, 10],
    textStyle: {color: amanda.color("--text"), fontSize: 12, lineHeight: 18},
  });
  const line = () => ({lineStyle: {color: amanda.color("--line")}});
  const axis = (more) => ({
    axisLine: line(), axisTick: {show: false}, splitLine: line(),
    axisLabel: {color: amanda.color("--dim")}, nameTextStyle: {color: amanda.color("--dim")},
    ...more,
  });
  // A legend of all names, in as many lines as they need; pages of it would cut the last name.
  const legend = (more) => ({
    type: "plain", top: 0, left: 0, padding: 5, itemWidth: 12, itemHeight: 12, itemGap: GAP,
    textStyle: {color: amanda.color("--text"), lineHeight: LINE}, ...more,
  });
  // The pixels that the lines after the first take in this width.
  const legendRoom = (names, width) => {
    pen.font = `${SIZE}px ${FONT}`;
    let [lines, x] = [0, 0];
    for (const name of names) {
      const wide = 12 + 5 + 1.1 * pen.measureText(name).width;
      if (x && x + wide > width - 10) [lines, x] = [lines + 1, 0];
      x += wide + GAP;
    }
    return lines * (LINE + GAP);
  };

  // How names are shown in this many pixels: `text(name)`, and the `width` of the longest. Of
  // modules the outermost are cut to their first letters, `e.l.3.attention/linear` or `exp_avg of
  // e.l.3.weight`, and what is still too long loses its middle.
  const fitted = (names, most) => {
    pen.font = `${SIZE}px ${FONT}`;
    const width = (text) => pen.measureText(text).width;
    const cut = (name) => {
      const [, what, path] = /^(\S+ of )?(.*)$/s.exec(name);
      const parts = path.split("."), whole = () => `${what ?? ""}${parts.join(".")}`;
      for (let n = 0; n < parts.length - 1 && width(whole()) > most; n += 1)
        if (!/^\d*$/.test(parts[n])) parts[n] = [...parts[n]][0];
      const letters = [...whole()];
      const without = (n) => n ? `${letters.slice(0, (letters.length - n) >> 1).join("")}…` +
        letters.slice((letters.length + n) >> 1).join("") : letters.join("");
      let [least, enough] = [0, letters.length];
      while (least < enough) {
        const n = (least + enough) >> 1;
        if (width(without(n)) > most) least = n + 1; else enough = n;
      }
      return without(least);
    };
    const texts = new Map(names.map((name) => [name, cut(name)]));
    return {text: (name) => texts.get(name) ?? name, width: Math.ceil(Math.max(0, ...[...texts.values()].map(width)))};
  };

  // Draw into `host`: `option(width)` gives ECharts' option with the colours that hold now, and
  // `height(width)` the pixels that it needs. `items`, if there are any, can be gone through by the arrow keys: each has a text, and `use()` is Enter.
  const draw = (host, {height, option, label, items = () => [], show = () => {}, keys = {}}) => {
    const canvas = amanda.make("div", "canvas"), said = amanda.make("p", "said");
    canvas.tabIndex = 0;
    said.setAttribute("role", "status");
    host.append(canvas, said);
    const stretch = () => { canvas.style.height = `${height(canvas.clientWidth)}px`; };
    stretch();
    const chart = echarts.init(canvas);
    const repaint = () => {
      const before = canvas.style.height;
      stretch();
      if (before !== canvas.style.height) chart.resize();
      chart.setOption({...common(), ...option(canvas.clientWidth)}, true);
    };
    repaint();
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    let at = -1;
    const go = (to) => {
      const every = items();
      if (!every.length) return;
      at = Math.max(0, Math.min(every.length - 1, to));
      said.textContent = every[at].text;
      show(chart, every[at], at);
    };
    canvas.addEventListener("keydown", (event) => {
      const call = {
        ArrowRight: () => go(at + 1), ArrowDown: () => go(at + 1), ArrowLeft: () => go(at - 1),
        ArrowUp: () => go(at - 1), Home: () => go(0), End: () => go(Infinity),
        Enter: () => items()[at] && items()[at].use && items()[at].use(), ...keys,
      }[event.key];
      if (!call || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      call(said);
    });
    canvas.addEventListener("blur", () => {
      at = -1;
      said.textContent = "";
      chart.dispatchAction({type: "hideTip"});
    });
    const resize = () => { chart.resize(); repaint(); };
    return {chart, repaint, resize, canvas, said};
  };

  // A choice beside a chart's title; `call(index)` is made now and at each change.
  const choice = (host, title, labels, call) => {
    if (labels.length > 1) {
      const select = amanda.make("select", "", ...labels.map((label, n) => new Option(label, n)));
      select.addEventListener("change", () => call(Number(select.value)));
      host.append(amanda.make("label", "", `${title} `, select));
    }
    call(0);
  };

    // Left of the labels of an axis of numbers, whose width ECharts estimates up to a tenth too small.
  const ROOM = 10;

  return {draw, axis, legend, legendRoom, tooltip, choice, fitted, SHAPES, ROOM};
})();

"use strict";
// The frame of a chart: ECharts with the page's colours, its size, and use by keyboard. Tooltips
// are drawn on the canvas, since the page's policy refuses the markup of others.
amanda.frame = (() => {
  const common = () => ({
    animation: !matchMedia("(prefers-reduced-motion: reduce)").matches, animationDuration: 250,
    color: amanda.categories(),
    textStyle: {color: amanda.color("--text"), fontFamily: "system-ui, sans-serif", fontSize: 12},
  });
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
  const legend = (more) => ({
    type: "scroll", top: 0, left: 0, itemWidth: 12, itemHeight: 12, itemGap: 14,
    textStyle: {color: amanda.color("--text")}, pageTextStyle: {color: amanda.color("--dim")},
    pageIconColor: amanda.color("--accent"), pageIconInactiveColor: amanda.color("--line"), ...more,
  });

  // Draw into `host`: `option()` gives ECharts' option with the colours that hold now. `items`, if
  // there are any, can be gone through by the arrow keys: each has a text, and `use()` is Enter.
  const draw = (host, {height, option, label, items = () => [], show = () => {}, keys = {}}) => {
    const canvas = amanda.make("div", "canvas"), said = amanda.make("p", "said");
    canvas.style.height = `${height}px`;
    canvas.tabIndex = 0;
    said.setAttribute("role", "status");
    host.append(canvas, said);
    const chart = echarts.init(canvas);
    const repaint = () => chart.setOption({...common(), ...option(canvas.clientWidth)}, true);
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
    return {
      chart, repaint, resize, canvas, said,
      height: (pixels) => { canvas.style.height = `${pixels}px`; chart.resize(); },
    };
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

  return {draw, axis, legend, tooltip, choice};
})();

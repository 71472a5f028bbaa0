"use strict";
// The largest rows, as bars: operators, modules, types or whatever a part lists.
amanda.charts.bars = (host, chart, context) => {
  const {rows} = amanda, MOST = chart.most || 15;
  // Where there is little room, names stand above their bars.
  const isNarrow = (width) => width < 440;
  const bar = amanda.make("div", "choices");
  const nothing = amanda.make("p", "dim");
  host.append(bar, nothing);
  const measures = rows.measures(context.result, chart);
  const parts = chart.by || [{label: "", part: chart.part}];
  let measure = measures[0], part = parts[0], shown = [], drawn = null;

  const whole = (row) => measure.values.reduce((sum, one) => sum + (rows.number(row, one) || 0), 0);
  const choose = () => {
    const every = rows.of(context.result, part.part);
    const found = (part.group ? rows.grouped(every, part.group, measure.values) : every)
      .filter((row) => row.name !== "" && whole(row));
    if (!chart.ordered) found.sort((a, b) => (whole(b) - whole(a)) * (measure.lowest ? -1 : 1));
    shown = found.slice(0, MOST);
    nothing.hidden = shown.length > 0;
    nothing.textContent = every.length ? "All are 0." : "Nothing was measured.";
    if (drawn) drawn.repaint();
  };
  const room = (width) => measure.values.length > 1 ? amanda.frame.legendRoom(measure.labels, width) : 0;
  const height = (width) => (isNarrow(width) ? 40 : 24) * Math.max(1, shown.length) + (measure.values.length > 1 ? 34 : 10) + room(width);
  const told = (number) => measure.unit === "%" ? rows.percent(number) : amanda.quantity(number, measure.unit);
  const text = (row) => [row.name, ...measure.values.map((one, n) => measure.values.length > 1
    ? `${measure.labels[n]}: ${told(rows.number(row, one))}` : told(rows.number(row, one)))].join("\n");
  const use = (row) => { if (rows.isOp(row)) context.select({name: rows.opOf(row)}); };

  const brief = (name) => name.replace(/^(.*):\w*Backward\w*$/, "$1 ∇");

  const option = (width) => {
    const {axis, legend, fitted} = amanda.frame, narrow = isNarrow(width);
    const names = fitted(shown.map((row) => brief(row.name)), narrow ? width : width * .45);
    return {
      grid: {left: narrow ? 0 : names.width + 10, right: 88, top: measure.values.length > 1 ? 30 + room(width) : 4, bottom: 2},
      legend: measure.values.length > 1 ? legend() : undefined,
      // The longest bar takes all of the width.
      xAxis: axis({type: "value", show: false, max: Math.max(0, ...shown.map(whole)) || undefined}),
      yAxis: axis({type: "category", inverse: true, data: shown.map((row) => row.name),
        triggerEvent: true, axisLine: {show: false}, z: 3,
        axisLabel: {color: amanda.color("--text"), interval: 0, formatter: (name) => names.text(brief(name)),
          ...(narrow ? {inside: true, margin: 0, verticalAlign: "bottom", padding: [0, 0, 10, 0]} : {})}}),
      series: measure.values.map((one, n) => ({
        type: "bar", stack: "all", name: measure.labels[n], barWidth: 14, cursor: "pointer",
        itemStyle: {borderRadius: 2},
        data: shown.map((row) => rows.number(row, one) || 0),
        label: n + 1 < measure.values.length ? undefined : {show: true, position: "right",
          color: amanda.color("--dim"), formatter: (params) => told(whole(shown[params.dataIndex]))},
      })),
      tooltip: {...amanda.frame.tooltip(), formatter: (params) => text(shown[params.dataIndex])},
    };
  };

  amanda.frame.choice(bar, "By", parts.map((one) => one.label), (n) => { part = parts[n]; choose(); });
  amanda.frame.choice(bar, "Show", measures.map((one) => one.label),
                      (n) => { measure = measures[n]; choose(); });
  drawn = amanda.frame.draw(host, {
    height, option, label: `${chart.title}, the ${measure.lowest ? "smallest" : "largest"} ${shown.length}`,
    items: () => shown.map((row) => ({text: text(row).replaceAll("\n", ", "), use: () => use(row)})),
    show: (one, _, n) => one.dispatchAction({type: "showTip", seriesIndex: 0, dataIndex: n}),
  });
  drawn.chart.on("click", (params) => {
    const row = params.componentType === "yAxis" ? shown.find((one) => one.name === params.value)
      : shown[params.dataIndex];
    if (row) use(row);
  });
  return drawn;
};

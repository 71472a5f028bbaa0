"use strict";
// Numbers over steps or time: columns or areas that stand on each other, or lines.
amanda.charts.lines = (host, chart, context) => {
  const {rows} = amanda, {axis, legend, legendRoom, fitted, ROOM} = amanda.frame;
  const found = rows.of(context.result, chart.part);
  // Either fields of each row, or rows that each have a list of numbers.
  const every = chart.values
    ? chart.values.map((one, n) => ({name: (chart.labels || [])[n] || rows.label(one),
                                     data: found.map((row) => rows.number(row, one))}))
    : found.map((row) => ({name: row[chart.name] || row.name, row, data: row[chart.list]}));
  const x = chart.values ? found.map((row) => rows.value(row, chart.x))
    : rows.value(context.result, chart.x);
  // Of many lines those with the largest numbers.
  const largest = (one) => Math.max(...one.data.map((value) => value || 0));
  const series = chart.most ? every.sort((a, b) => largest(b) - largest(a)).slice(0, chart.most) : every;
  const left = every.length - series.length;
  const unit = chart.unit ?? rows.unit(context.result, (chart.values || [chart.list])[0], chart.part);
  const xUnit = chart.x_unit || "", columns = chart.style === "columns";
  const marked = chart.values && chart.marked ? found.map((row) => Boolean(row[chart.marked])) : [];
  const shown = (number) => unit === "%" ? rows.percent(number) : amanda.quantity(number, unit);
  const named = (n) => `${chart.x_label || rows.label(chart.x)} ${amanda.quantity(x[n], xUnit)}` +
    (marked[n] ? ` (${rows.label(chart.marked)})` : "");
  // Marked columns, such as those of the warm-up, must not make the others too small to read.
  const sum = (n) => series.reduce((found, one) => found + (one.data[n] || 0), 0);
  const highest = () => {
    const top = Math.max(...x.map((_, n) => marked[n] ? 0 : sum(n)));
    return columns && marked.some((one) => one) && top ? Number((1.2 * top).toPrecision(2)) : undefined;
  };
  const told = (n) => [named(n), ...series.filter((one) => one.data[n] !== null && one.data[n] !== undefined)
    .map((one) => ({name: one.name, size: one.data[n]})).filter((one) => one.size || series.length < 8)
    .sort((a, b) => b.size - a.size).slice(0, 12)
    .map((one) => `${rows.cut(one.name, 40)}: ${shown(one.size)}`)].join("\n");

  const top = highest(), isCut = (n) => top !== undefined && marked[n] && sum(n) > top;
  const lower = x.some((_, n) => isCut(n)) ? 16 : 0;  // For the line below the number of a step.
  const names = (width) => fitted(series.map((one) => one.name), Math.max(260, width / 4)).text;
  const room = (width) => legendRoom(series.map((one) => names(width)(one.name)), width);
  const option = (width) => ({
    grid: {left: ROOM, right: xUnit ? 30 : 16, top: 34 + room(width), bottom: 34, containLabel: true},
    legend: legend({formatter: names(width)}),
    xAxis: axis({
      type: columns || !xUnit ? "category" : "value", name: chart.x_label || rows.label(chart.x),
      nameLocation: "middle", nameGap: 26 + lower, boundaryGap: columns, splitLine: {show: false},
      ...(columns || !xUnit ? {data: x.map(String)} : {min: "dataMin", max: "dataMax"}),
      axisLabel: {color: amanda.color("--dim"), hideOverlap: true, showMaxLabel: columns || !xUnit,
        formatter: (value, n) => xUnit ? amanda.quantity(Number(value), xUnit)
          : isCut(n) ? `${value}\n${shown(sum(n))}` : value, lineHeight: 16},
    }),
    yAxis: axis({type: chart.log ? "log" : "value", max: top, axisLabel: {color: amanda.color("--dim"),
      showMaxLabel: top === undefined, formatter: shown}}),
    series: series.map((one, n) => ({
      name: one.name, type: columns ? "bar" : "line", stack: chart.stack ? "all" : undefined,
      symbol: "circle", symbolSize: 5,
      showSymbol: !columns && x.length < 30, barMaxWidth: 36,
      lineStyle: {width: chart.stack ? 0 : 1.8}, areaStyle: chart.stack && !columns ? {opacity: .75} : undefined,
      data: (xUnit && !columns ? one.data.map((value, k) => [x[k], value]) : one.data)
        .map((value, k) => chart.log && !(value > 0) && !Array.isArray(value) ? null : columns && marked[k] ? {value, itemStyle: {opacity: .4}} : value),
      markLine: n ? undefined : marks(),
    })),
    dataZoom: x.length > 60 ? [{type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl"}] : [],
    tooltip: {...amanda.frame.tooltip(), trigger: "axis", axisPointer: {type: columns ? "shadow" : "line"},
      formatter: (params) => told(params[0].dataIndex)},
  });
  // Marks at places of x: {at, label}.
  const marks = () => !(chart.marks || []).length ? undefined : {
    symbol: "none", silent: true, lineStyle: {color: amanda.color("--bad"), type: "dashed"},
    label: {color: amanda.color("--bad"), formatter: (params) => rows.cut(params.name, 40)},
    data: chart.marks.map((one) => ({xAxis: columns || !xUnit ? String(one.at) : one.at, name: one.label})),
  };

  if (!x.length || !series.length) {
    host.replaceChildren(amanda.make("p", "dim", "Nothing was measured."));
    return {};
  }
  if (left > 0) host.append(amanda.make("p", "dim", `The ${series.length} largest of ${every.length}`));
  const drawn = amanda.frame.draw(host, {
    height: (width) => (chart.height || 300) + room(width), option, label: `${chart.title}, ${x.length} points`,
    items: () => x.map((_, n) => ({text: told(n).replaceAll("\n", ", ")})),
    show: (one, _, n) => one.dispatchAction({type: "showTip", seriesIndex: 0, dataIndex: n}),
  });
  drawn.chart.on("click", (params) => {
    const one = series[params.seriesIndex];
    if (one && one.row && rows.isOp(one.row)) context.select(one.row);
  });
  return drawn;
};

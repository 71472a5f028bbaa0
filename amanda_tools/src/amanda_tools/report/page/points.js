"use strict";
// A number of each row in the order of the rows, such as how far two runs are apart at each tensor.
amanda.charts.points = (host, chart, context) => {
  const {rows} = amanda, {axis, legend, legendRoom, SHAPES, ROOM} = amanda.frame;
  const found = rows.of(context.result, chart.part);
  const name = (row) => rows.value(row, chart.label || "name");
  const kinds = [...new Set(found.map((row) => row[chart.color] ?? ""))];
  const value = (row) => rows.number(row, chart.value);
  const told = (number) => chart.unit === "%" ? rows.percent(number) : amanda.quantity(number, chart.unit || "");
  const text = (row) => [name(row), ...(chart.color ? [row[chart.color]] : []),
    `${chart.value_label || rows.label(chart.value)}: ${told(value(row))}`].join("\n");
  // Zero has no place on a logarithmic axis: it is put at its foot.
  const positive = found.map(value).filter((number) => number > 0);
  if (chart.log && !positive.length) {
    host.replaceChildren(amanda.make("p", "dim", "All are zero."));
    return {};
  }
  const foot = chart.log ? 10 ** (Math.floor(Math.log10(Math.min(...positive))) - 1) : 0;

  const series = kinds.map((kind, n) => ({kind, n, rows: found.map((row, at) => ({row, at}))
    .filter(({row}) => (row[chart.color] ?? "") === kind && value(row) !== null)}));
  const room = (width) => kinds.length > 1 ? legendRoom(kinds.map(String), width) : 0;
  const option = (width) => ({
    grid: {left: ROOM, right: 16, top: kinds.length > 1 ? 34 + room(width) : 12, bottom: 34, containLabel: true},
    legend: kinds.length > 1 ? legend() : undefined,
    xAxis: axis({type: "value", min: 0, max: Math.max(1, found.length - 1), name: chart.x_label || "in order",
      nameLocation: "middle", nameGap: 24, splitLine: {show: false}, axisLabel: {show: false}}),
    yAxis: axis({type: chart.log ? "log" : "value", min: chart.log ? foot : undefined,
      axisLabel: {color: amanda.color("--dim"), formatter: (number) => chart.log
        ? number <= foot ? "0" : number.toExponential(0) : told(number)}}),
    series: series.map((one) => ({
      type: "scatter", name: String(one.kind), symbolSize: 8, cursor: "pointer",
      symbol: SHAPES[one.n % SHAPES.length],
      data: one.rows.map(({row, at}) => ({value: [at, Math.max(value(row), foot)],
        itemStyle: chart.fine && row[chart.fine] ? {opacity: .35} : undefined})),
      markLine: one.n || first < 0 ? undefined : {symbol: "none", silent: true,
        lineStyle: {color: amanda.color("--bad"), type: "dashed"},
        label: {color: amanda.color("--bad"), position: "insideEndTop", formatter: "the first"},
        data: [{xAxis: first}]},
    })),
    dataZoom: [{type: "inside", xAxisIndex: 0, zoomOnMouseWheel: "ctrl"}],
    tooltip: {...amanda.frame.tooltip(),
      formatter: (params) => text(series[params.seriesIndex].rows[params.dataIndex].row)},
  });
  // One operator has several rows, so the whole row is compared.
  const beyond = JSON.stringify(chart.first ? rows.value(context.result, chart.first) : null);
  const first = found.findIndex((row) => JSON.stringify(row) === beyond);

  const every = series.flatMap((one) => one.rows.map((entry, n) => ({...entry, series: one.n, n})))
    .sort((a, b) => a.at - b.at);
  const drawn = amanda.frame.draw(host, {
    height: (width) => (chart.height || 320) + room(width), option, label: `${chart.title}, ${every.length} points`,
    items: () => every.map(({row, series, n}) => ({series, n, text: text(row).replaceAll("\n", ", "),
      use: () => context.select({name: name(row)})})),
    show: (one, item) => one.dispatchAction({type: "showTip", seriesIndex: item.series, dataIndex: item.n}),
  });
  drawn.chart.on("click", (params) => {
    const one = series[params.seriesIndex];
    if (one && params.componentType === "series") context.select({name: name(one.rows[params.dataIndex].row)});
  });
  return drawn;
};

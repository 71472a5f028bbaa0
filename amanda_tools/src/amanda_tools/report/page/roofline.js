"use strict";
// How fast operators compute, and how much they compute for each byte: their cost from one result,
// their time from another one of the same run.
amanda.charts.roofline = (host, chart, context) => {
  const {rows} = amanda, {axis, SHAPES, ROOM} = amanda.frame;
  const other = Object.values(context.results).find((result) => result.format === chart.needs[0]);
  const times = new Map(other.ops.filter((row) => row.phase === "forward" && row.calls)
    .map((row) => [row.name, (row.device ? row.device_self : row.self) / row.calls / 1e9]));
  const points = rows.of(context.result, chart.part).filter((row) => row.calls && row.flops && row.moved)
    .map((row) => {
      const cost = row.flops / row.calls, time = times.get(row.name);
      return {row, cost, time, speed: cost / time, intensity: cost / row.moved, rate: row.moved / time};
    }).filter((one) => one.time > 0);
  if (!points.length) {
    host.replaceChildren(amanda.make("p", "dim", "No operator has both a cost and a time."));
    return {};
  }
  const most = (key) => Math.max(...points.map((one) => one[key]));
  const least = (key) => Math.min(...points.map((one) => one[key]));
  const speed = most("speed"), rate = most("rate"), corner = speed / rate;
  const left = Math.min(least("intensity"), corner) / 2, right = Math.max(most("intensity"), corner) * 2;
  const longest = most("time");
  const kinds = [...new Set(points.map(({row}) => row.word || row.type))];
  const text = (one) => [one.row.name, `${amanda.quantity(one.speed, "FLOP/s")}, ` +
    `${rows.percent(one.speed / speed)} of the fastest`,
    `${amanda.quantity(one.intensity)} FLOPs for each byte`, `${amanda.quantity(one.time, "s")} a call`].join("\n");
  const series = kinds.map((kind, n) => ({kind, n,
    points: points.filter(({row}) => (row.word || row.type) === kind)}));

  // The ends of the axes are not round.
  const room = (width) => amanda.frame.legendRoom([...kinds, "the fastest here"], width);
  const option = (width, ends = {color: amanda.color("--dim"), showMinLabel: false, showMaxLabel: false}) => ({
    grid: {left: ROOM, right: 24, top: 34 + room(width), bottom: 36, containLabel: true},
    legend: amanda.frame.legend(),
    xAxis: axis({type: "log", min: left, max: right, name: "FLOPs for each byte", nameLocation: "middle",
      nameGap: 26, axisLabel: {...ends, formatter: (number) => amanda.quantity(number)}}),
    yAxis: axis({type: "log", max: speed * 2, min: Math.min(least("speed"), rate * left) / 2,
      axisLabel: {...ends, formatter: (number) => amanda.quantity(number, "FLOP/s")}}),
    series: [...series.map((one) => ({
      type: "scatter", name: one.kind, symbol: SHAPES[one.n % SHAPES.length], cursor: "pointer",
      itemStyle: {opacity: .8},
      data: one.points.map((point) => ({value: [point.intensity, point.speed],
        symbolSize: 6 + 18 * Math.sqrt(point.time / longest)})),
    })), {
      type: "line", name: "the fastest here", showSymbol: false, silent: true,
      lineStyle: {color: amanda.color("--dim"), type: "dashed", width: 1.5},
      itemStyle: {color: amanda.color("--dim")},
      data: [[left, rate * left], [corner, speed], [right, speed]],
    }],
    tooltip: {...amanda.frame.tooltip(),
      formatter: (params) => text(series[params.seriesIndex].points[params.dataIndex])},
  });
  const every = series.flatMap((one) => one.points.map((point, n) => ({point, series: one.n, n})))
    .sort((a, b) => b.point.time - a.point.time);
  const drawn = amanda.frame.draw(host, {
    height: (width) => 380 + room(width), option, label: `${chart.title}, ${points.length} operators`,
    items: () => every.map(({point, series, n}) => ({series, n, text: text(point).replaceAll("\n", ", "),
      use: () => context.select(point.row)})),
    show: (one, item) => one.dispatchAction({type: "showTip", seriesIndex: item.series, dataIndex: item.n}),
  });
  drawn.chart.on("click", (params) => {
    const one = series[params.seriesIndex];
    if (one) context.select(one.points[params.dataIndex].row);
  });
  return drawn;
};

"use strict";
// A share of 1 for each row and column, as a colour. Rows that have the same cell are added up.
amanda.charts.heat = (host, chart, context) => {
  const {rows} = amanda, {axis} = amanda.frame, ROW = 20, MOST = 40;
  const found = rows.of(context.result, chart.part), [part, whole] = chart.value;
  // As texts: a number would be the place of a column, not its name.
  const at = (row, field) => String(row[field] ?? "") || "(none)";
  const names = [...new Set(found.map((row) => at(row, chart.row)))];
  const columns = [...new Set(found.map((row) => at(row, chart.column)))];
  const sums = new Map();
  for (const row of found) {
    const key = JSON.stringify([at(row, chart.column), at(row, chart.row)]);
    if (!sums.has(key)) sums.set(key, [0, 0, row]);
    const sum = sums.get(key);
    sum[0] += rows.number(row, part) || 0;
    sum[1] += rows.number(row, whole) || 0;
  }
  const cells = [...sums].filter(([, sum]) => sum[1]).map(([key, [some, all, row]]) => {
    const [column, name] = JSON.parse(key);
    return {column, name, share: some / all, some, all, row};
  });
  const text = (cell) => `${cell.name}\n${cell.column}: ${rows.percent(cell.share)} ` +
    `(${amanda.quantity(cell.some)} of ${amanda.quantity(cell.all)})`;

  const option = (width) => {
    const labels = amanda.frame.fitted(names, width * .45), long = names.length > MOST;
    return {
      grid: {left: labels.width + 10, right: long ? 26 : 4, top: 24, bottom: 46},
      xAxis: axis({type: "category", data: columns, position: "top", splitLine: {show: false}}),
      yAxis: axis({type: "category", data: names, inverse: true, splitLine: {show: false},
        triggerEvent: true, axisLabel: {color: amanda.color("--text"), interval: 0,
          formatter: labels.text}}),
      visualMap: {min: 0, max: 1, calculable: true, orient: "horizontal", left: "center", bottom: 0,
        itemHeight: 160, itemWidth: 12, inRange: {color: amanda.scale()}, formatter: (share) => rows.percent(share),
        textStyle: {color: amanda.color("--dim")}},
      dataZoom: long ? [{type: "slider", yAxisIndex: 0, right: 0, width: 16, startValue: 0,
        endValue: MOST - 1, brushSelect: false, showDetail: false}] : [],
      series: [{type: "heatmap", data: cells.map((cell) => [cell.column, cell.name, cell.share]),
        label: {show: columns.length < 8 && width > 560, formatter: (params) => rows.percent(params.value[2])},
        itemStyle: {borderColor: amanda.color("--back"), borderWidth: 2}}],
      tooltip: {...amanda.frame.tooltip(), formatter: (params) => text(cells[params.dataIndex])},
    };
  };
  const drawn = amanda.frame.draw(host, {
    height: () => ROW * Math.min(names.length, MOST) + 76, option, label: `${chart.title}, ${cells.length} cells`,
    items: () => cells.map((cell) => ({text: text(cell).replace("\n", ", "), use: () => use(cell.row)})),
    show: (one, _, n) => one.dispatchAction({type: "showTip", seriesIndex: 0, dataIndex: n}),
  });
  const use = (row) => { if (rows.isOp(row)) context.select(row); };
  drawn.chart.on("click", (params) => {
    const row = params.componentType === "yAxis" ? found.find((one) => at(one, chart.row) === params.value)
      : cells[params.dataIndex].row;
    use(row);
  });
  return drawn;
};

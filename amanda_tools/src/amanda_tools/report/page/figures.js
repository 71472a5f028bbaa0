"use strict";
// Single numbers that matter most, as tiles.
amanda.charts.figures = (host, chart, context) => {
  host.classList.add("tiles");
  host.style.setProperty("--count", chart.items.length);
  for (const {label, value, unit, detail, op} of chart.items) {
    const isCount = Number.isInteger(value) && !unit && value < 1e6;
    const shown = unit === "%" ? amanda.rows.percent(value)
      : isCount ? value.toLocaleString("en-US") : amanda.quantity(value, unit || "");
    const tile = amanda.make(op ? "button" : "div", "tile",
      amanda.make("span", "value", shown), amanda.make("span", "name", label),
      detail ? amanda.make("span", "dim", detail) : null);
    if (op) {
      tile.type = "button";
      tile.addEventListener("click", () => context.select({name: op}));
    }
    host.append(tile);
  }
  return {};
};

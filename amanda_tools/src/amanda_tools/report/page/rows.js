"use strict";
// Reading of results: rows of a part, values in a row, units, and the names that people see.
amanda.rows = (() => {
  // What a column of numbers is called where its field's name is not a word.
  const WORDS = {word: "common type", macs: "MACs", flops: "FLOPs", id: "id", ops: "operators", op: "operator", p95: "p95"};

  const of = (result, part) => {
    const found = result[part];
    if (Array.isArray(found)) return found;
    if (found === null || typeof found !== "object")
      throw new Error(`The result has no rows in ${JSON.stringify(part)}`);
    return Object.entries(found).map(([name, row]) =>
      row !== null && typeof row === "object" ? {...row, name} : {name, value: row});
  };

  // A value: a field, a field of a field as "difference.max_abs", or a quotient [part, whole].
  const value = (row, path) => {
    if (Array.isArray(path)) {
      const [part, whole] = path.map((one) => value(row, one));
      return whole ? part / whole : null;
    }
    return path.split(".").reduce((found, key) => found === null || found === undefined
      ? null : found[key], row);
  };
  const number = (row, path) => {
    const found = value(row, path);
    return typeof found === "number" && Number.isFinite(found) ? found : null;
  };

  const unit = (result, column, part) => {
    const units = result.units || {};
    if (typeof units !== "object" || Array.isArray(column)) return "";
    const found = units[column] ?? units[`${part}.*`] ?? (String(column).endsWith("_seconds") ? "s" : "");
    return found === "MACs" || found === "FLOPs" ? "" : found;
  };
  const label = (name) => String(name).split("_").map((word) => WORDS[word] || word).join(" ");

  const title = (name) => label(name).replace(/^./, (letter) => letter.toUpperCase());

  // Measures of a chart: each has a label, a unit and the values that are added up.
  const measures = (result, chart) => chart.measures.map((one) => ({
    label: one.label, values: one.values, labels: one.labels || one.values.map(label),
    lowest: one.lowest, unit: one.unit ?? unit(result, one.values[0], chart.part),
  }));

  // Rows with the same value of a field as one, with the sums of their numbers. `a|b` is the first
  // field that has a value.
  const grouped = (found, field, values) => {
    const groups = new Map();
    for (const row of found) {
      const name = field.split("|").map((one) => row[one]).find((one) => one) || "(none)";
      if (!groups.has(name)) groups.set(name, {name});
      const group = groups.get(name);
      for (const one of values) group[one] = (group[one] || 0) + (number(row, one) || 0);
    }
    return [...groups.values()];
  };

  // The operator that a row is about: its own, or the one that it names; null if there is none.
  const opOf = (row) => {
    if (row === null || typeof row !== "object") return null;
    if (typeof row.name === "string" && ["module", "type", "kind"].some((key) => key in row)) return row.name;
    if (typeof row.op === "string") return row.op;
    return row.a && typeof row.a.name === "string" ? row.a.name : null;
  };
  const isOp = (row) => opOf(row) !== null;
  const cut = (text, length) => text.length > length ? `…${text.slice(1 - length)}` : text;
  const percent = (share) => share === null ? "" : `${Number((100 * share).toPrecision(3))}%`;

  return {of, value, number, unit, label, title, measures, grouped, opOf, isOp, cut, percent};
})();

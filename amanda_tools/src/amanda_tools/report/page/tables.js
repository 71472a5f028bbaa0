"use strict";
// The parts of a result as tables: sorted by a click on a heading, the rest of the rows on request.
amanda.table = (() => {
  const {rows, make} = amanda;
  const FIRST = 12, WIDTH = 120;
  //: Fields that the details of an operator show, and that would only make a table wide.
  const HIDDEN = new Set(["id", "namespace", "word", "forward_type", "index"]);

  // A list of texts and numbers, without what is missing at its end; null for anything else.
  const listed = (value) => {
    if (!Array.isArray(value) || value.some((one) => one !== null && typeof one === "object")) return null;
    const known = value.findLastIndex((one) => one !== null) + 1;
    return value.slice(0, known).map((one) => one ?? "–").join(", ");
  };
  const shown = (value, unit) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return amanda.quantity(value, unit);
    const text = typeof value === "string" ? value : listed(value) ?? JSON.stringify(value);
    return text.length > WIDTH ? `${text.slice(0, WIDTH - 1)}…` : text;
  };
  const columnsOf = (found) => {
    const columns = new Set(["name"]);
    for (const row of found) for (const key of Object.keys(row)) if (!HIDDEN.has(key)) columns.add(key);
    const used = (key) => found.some((row) =>
      ![null, undefined, "", 0, false].includes(row[key]) && !(Array.isArray(row[key]) && !row[key].length));
    return [...columns].filter(used);
  };

  // The table of some rows; `select(row)` is called for a row of an operator.
  const draw = (host, result, part, select) => {
    const found = rows.of(result, part).map((row) =>
      row !== null && typeof row === "object" && !Array.isArray(row) ? row : {value: row});
    const columns = columnsOf(found);
    const numeric = new Set(columns.filter((key) =>
      found.every((row) => row[key] === null || row[key] === undefined || typeof row[key] === "number")));
    let order = null, down = true, all = false;
    const body = make("tbody"), more = make("button", "more"), head = make("tr");
    more.type = "button";
    const fill = () => {
      const sorted = order === null ? found : [...found].sort((a, b) => {
        const [one, two] = [a[order], b[order]].map((value) => value ?? (numeric.has(order) ? -Infinity : ""));
        const sign = one < two ? -1 : one > two ? 1 : 0;
        return down ? -sign : sign;
      });
      body.replaceChildren(...sorted.slice(0, all ? Infinity : FIRST).map((row) => {
        const line = make("tr", "", ...columns.map((key, n) => {
          const text = shown(row[key], rows.unit(result, key, part));
          const cell = make("td", numeric.has(key) ? "number" : "");
          if (n === 0 && rows.isOp(row)) {
            const button = make("button", "link", text);
            button.type = "button";
            button.addEventListener("click", () => select({name: rows.opOf(row)}));
            cell.append(button);
          } else cell.append(text);
          return cell;
        }));
        if (rows.isOp(row)) line.dataset.op = rows.opOf(row);
        return line;
      }));
      more.textContent = all ? "Fewer rows" : `All ${found.length} rows`;
      more.hidden = found.length <= FIRST;
    };
    more.addEventListener("click", () => { all = !all; fill(); });
    for (const key of columns) {
      const button = make("button", "", rows.label(key)), cell = make("th", numeric.has(key) ? "number" : "", button);
      button.type = "button";
      cell.scope = "col";
      button.addEventListener("click", () => {
        down = order === key ? !down : numeric.has(key);
        order = key;
        for (const other of head.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        fill();
      });
      head.append(cell);
    }
    fill();
    host.append(make("div", "scrolled", make("table", "", make("thead", "", head), body)), more);
  };

  return {draw, shown};
})();

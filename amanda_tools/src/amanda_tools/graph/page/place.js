"use strict";
// The link to a place: which graph, what is unfolded and selected, and the view.
(() => {
const lib = (globalThis.amandaGraph ??= {});

const textOf = (place) => {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(place)) {
    if (Array.isArray(value)) for (const one of value) found.append(name, one);
    else if (value !== null && value !== undefined && value !== "") found.append(name, value);
  }
  return found.toString();
};

// Return the place that a text describes, as far as it is one.
const placeOf = (text) => {
  const found = new URLSearchParams(text.replace(/^#/, ""));
  const view = (found.get("view") || "").split(",").map(Number);
  return {graph: found.get("graph"), direction: found.get("direction"), color: found.get("color"),
          unfolded: found.getAll("unfolded"), select: found.get("select"),
          view: view.length === 3 && view.every(Number.isFinite) ? view : null,
          any: found.has("unfolded") || found.has("view") || found.has("select")};
};

Object.assign(lib, {textOf, placeOf});
})();

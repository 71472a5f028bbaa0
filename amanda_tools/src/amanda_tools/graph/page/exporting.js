"use strict";
// The drawing as SVG and PNG files.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "paint-order",
                "font", "opacity", "display"];
const LARGEST = 8000;

// Return the whole drawing as the text of an SVG file: each element has the colours of now.
const svgText = (canvas) => {
  const {svg, view: {bounds}} = canvas;
  const copy = svg.cloneNode(true);
  const all = (root) => [root, ...root.querySelectorAll("*")];
  const own = all(svg);
  all(copy).forEach((element, n) => {
    if (element.tagName === "title" || element.tagName === "defs") return;
    const style = getComputedStyle(own[n]);
    for (const name of STYLES) {
      const value = style.getPropertyValue(name);
      if (value) element.style.setProperty(name, value);
    }
    for (const name of ["tabindex", "role", "class"]) element.removeAttribute(name);
  });
  const margin = 16, width = bounds.width + 2 * margin, height = bounds.height + 2 * margin;
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("viewBox", [-margin, -margin, width, height].join(" "));
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const back = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({x: -margin, y: -margin, width, height,
                                              fill: amanda.color("--back")}))
    back.setAttribute(name, value);
  copy.prepend(back);
  // XML has no control characters, which names may have.
  const text = new XMLSerializer().serializeToString(copy)
    .replace(/[\x00-\x08\x0b\x0c\x0e-\x1f]/g, "\ufffd");
  return {text, width, height};
};

// Call `done` with a PNG of the whole drawing, or with null if the browser cannot make it.
const pngOf = (canvas, done) => {
  const {text, width, height} = svgText(canvas), image = new Image();
  const scale = Math.min(2, LARGEST / Math.max(width, height));
  image.addEventListener("error", () => done(null));
  image.addEventListener("load", () => {
    const picture = document.createElement("canvas");
    picture.width = Math.ceil(width * scale);
    picture.height = Math.ceil(height * scale);
    picture.getContext("2d").drawImage(image, 0, 0, picture.width, picture.height);
    picture.toBlob(done, "image/png");
  });
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
};

const save = (blob, name) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

Object.assign(lib, {svgText, pngOf, save});
})();

"use strict";
// What part of the drawing is visible: zoom, pan, the minimap.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const LEAST = .04, MOST = 3, READABLE = .62;

class View {
  // `svg` shows the drawing, on which `cover` lies; `onChange(own)` is called when the view changes.
  constructor(svg, cover, onChange) {
    this.svg = svg;
    this.cover = cover;
    this.onChange = onChange;
    this.x = 0;
    this.y = 0;
    this.scale = 1;
    this.bounds = {width: 1, height: 1};
    this.pointers = new Map();
    this.listen();
  }

  get size() {
    return {width: this.svg.clientWidth || 800, height: this.svg.clientHeight || 600};
  }

  set(x, y, scale, own = true) {
    this.scale = Math.min(MOST, Math.max(LEAST, scale));
    // Some of the drawing stays visible.
    const {width, height} = this.size, margin = 80 / this.scale;
    this.x = Math.min(this.bounds.width - margin, Math.max(margin - width / this.scale, x));
    this.y = Math.min(this.bounds.height - margin, Math.max(margin - height / this.scale, y));
    this.svg.setAttribute("viewBox", [this.x, this.y, width / this.scale, height / this.scale]
      .map((n) => n.toFixed(2)).join(" "));
    if (own) this.onChange();
  }

  // Show the whole drawing; with `readable` its beginning, if the whole would be too small to read.
  fit(readable = false) {
    const {width, height} = this.size, {bounds} = this;
    const whole = Math.min(1.25, (width - 40) / bounds.width, (height - 40) / bounds.height);
    const wide = Math.min(1, (width - 40) / bounds.width);
    const scale = readable ? Math.max(whole, Math.min(wide, READABLE)) : whole;
    const top = bounds.height * scale > height - 40 ? -16 / scale
      : (bounds.height - height / scale) / 2;
    this.set((bounds.width - width / scale) / 2, top, scale);
  }

  zoom(factor, at = null) {
    const {width, height} = this.size;
    const point = at || {x: width / 2, y: height / 2};
    const scale = Math.min(MOST, Math.max(LEAST, this.scale * factor));
    this.set(this.x + point.x / this.scale - point.x / scale,
             this.y + point.y / this.scale - point.y / scale, scale);
  }

  // Move as little as needed for a rectangle to be visible.
  reach({x, y, width, height}) {
    const margin = 30 / this.scale, size = this.size;
    const right = this.x + size.width / this.scale, bottom = this.y + size.height / this.scale;
    let left = this.x, top = this.y;
    if (x < this.x + margin || width > size.width / this.scale) left = x - margin;
    else if (x + width > right - margin) left += x + width - right + margin;
    if (y < this.y + margin || height > size.height / this.scale) top = y - margin;
    else if (y + height > bottom - margin) top += y + height - bottom + margin;
    // What is reached may have the focus, which the minimap must not cover.
    const map = this.cover.getBoundingClientRect(), whole = this.svg.getBoundingClientRect();
    const hidden = y + height - top - (map.top - whole.top) / this.scale;
    if (map.width && hidden > 0 && x + width - left > (map.left - whole.left) / this.scale) {
      top += Math.max(0, Math.min(hidden + margin, y - top - margin));
    }
    if (left !== this.x || top !== this.y) this.set(left, top, this.scale);
  }

  listen() {
    const {svg, pointers} = this;
    const at = (event) => {
      const box = svg.getBoundingClientRect();
      return {x: event.clientX - box.left, y: event.clientY - box.top};
    };
    svg.addEventListener("wheel", (event) => {
      // A page with more than this scrolls, unless the drawing is in use.
      if (this.shared && !event.ctrlKey && !svg.contains(document.activeElement)) return;
      event.preventDefault();
      const step = event.deltaMode ? event.deltaY * 18 : event.deltaY;
      this.zoom(Math.exp(-Math.max(-120, Math.min(120, step)) * .003), at(event));
    }, {passive: false});
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      pointers.set(event.pointerId, at(event));
      if (pointers.size === 1) this.moved = false;
    });
    svg.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId), now = at(event);
      if (!before) return;
      if (!this.moved && Math.hypot(now.x - before.x, now.y - before.y) < 4) return;
      if (!this.moved) svg.setPointerCapture(event.pointerId);
      this.moved = true;
      if (pointers.size === 2) {
        const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, one]) => one);
        const gap = (one) => Math.max(10, Math.hypot(one.x - other.x, one.y - other.y));
        this.zoom(gap(now) / gap(before), other);
      } else
        this.set(this.x - (now.x - before.x) / this.scale, this.y - (now.y - before.y) / this.scale,
                 this.scale);
      pointers.set(event.pointerId, now);
    });
    for (const type of ["pointerup", "pointercancel"])
      svg.addEventListener(type, (event) => pointers.delete(event.pointerId));
  }
}

// A small picture of the whole drawing, with a frame around what is visible.
class Minimap {
  constructor(canvas, view) {
    Object.assign(this, {canvas, view, boxes: []});
    const go = (event) => {
      const box = canvas.getBoundingClientRect(), {width, height} = view.size;
      view.set((event.clientX - box.left - this.left) / this.scale - width / view.scale / 2,
               (event.clientY - box.top - this.top) / this.scale - height / view.scale / 2, view.scale);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      go(event);
    });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  }

  draw() {
    const {canvas, view} = this, ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const {bounds} = view;
    this.scale = Math.min((width - 8) / bounds.width, (height - 8) / bounds.height);
    this.left = (width - bounds.width * this.scale) / 2;
    this.top = (height - bounds.height * this.scale) / 2;
    const brush = canvas.getContext("2d");
    brush.scale(ratio, ratio);
    brush.clearRect(0, 0, width, height);
    const rectangle = (box) => [this.left + box.x * this.scale, this.top + box.y * this.scale,
                                Math.max(1, box.width * this.scale), Math.max(1, box.height * this.scale)];
    for (const box of this.boxes) {
      brush.fillStyle = box.color;
      if (box.frame) {
        brush.strokeStyle = box.color;
        brush.lineWidth = .5;
        brush.strokeRect(...rectangle(box));
      } else brush.fillRect(...rectangle(box));
    }
    const {width: w, height: h} = view.size;
    brush.strokeStyle = this.frameColor;
    brush.lineWidth = 1.5;
    const [x, y, wide, high] = rectangle({x: view.x, y: view.y, width: w / view.scale, height: h / view.scale});
    const left = Math.max(1, x), top = Math.max(1, y);
    brush.strokeRect(left, top, Math.max(2, Math.min(width - 1, x + wide) - left),
                     Math.max(2, Math.min(height - 1, y + high) - top));
  }
}

Object.assign(lib, {View, Minimap});
})();

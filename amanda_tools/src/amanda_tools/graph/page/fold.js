"use strict";
// Which boxes are unfolded. Never more than about `limit` boxes are visible.
(() => {
const lib = (globalThis.amandaGraph ??= {});
const LIMIT = 300;
const FIRST = 24;

const isSmall = (box) => box.kind === "stack" || box.high - box.low <= 3 || isAround(box);
// What is not the model: an optimizer, operators outside of modules.
const isAround = (box) => box.kind === "zone" || box.kind === "surrounding";

class Fold {
  constructor(tree, limit = LIMIT) {
    this.tree = tree;
    this.limit = limit;
    this.unfolded = new Set();  // In the order of unfolding: the first folds first.
  }

  isUnfolded(box) { return box.parent === null || this.unfolded.has(box); }

  isVisible(box) {
    for (let at = box.parent; at; at = at.parent) if (!this.isUnfolded(at)) return false;
    return box.parent !== null;
  }

  // Return the innermost visible box that holds this one; null for the root.
  shown(box) {
    let found = box.parent ? box : null;
    for (let at = box.parent; at && at.parent; at = at.parent) if (!this.isUnfolded(at)) found = at;
    return found;
  }

  // Return the visible boxes, each before the boxes in it.
  visible() {
    const found = [];
    const visit = (box) => {
      for (const child of box.children) {
        found.push(child);
        if (child.children && this.isUnfolded(child)) visit(child);
      }
    };
    visit(this.tree.root);
    return found;
  }

  // Unfold a box and those around it; return the boxes that are folded for it.
  unfold(box) {
    const around = new Set();
    for (let at = box.children ? box : box.parent; at && at.parent; at = at.parent) around.add(at);
    for (const at of [...around].reverse()) {
      this.unfolded.delete(at);
      this.unfolded.add(at);
    }
    const folded = [];
    let count = this.visible().length;
    for (const at of [...this.unfolded]) {
      if (count <= this.limit) break;
      if (around.has(at)) continue;
      this.unfolded.delete(at);
      folded.push(at);
      count = this.visible().length;
    }
    return folded;
  }

  fold(box) { this.unfolded.delete(box); }

  foldAll() { this.unfolded.clear(); }

  // Unfold level by level while at most `most` boxes are visible. The first picture leaves stacks,
  // modules of few operators and what surrounds the model folded, and unfolds a level as a whole.
  unfoldWhile(most, first = false) {
    let count = this.visible().length, level = this.tree.root.children;
    while (level.length) {
      const groups = level.filter((box) => box.children && !(first && isSmall(box)));
      const total = groups.reduce((sum, box) => sum + this.added(box), 0);
      const whole = !first || count + total <= most;
      level = [];
      for (const box of groups) {
        const more = this.added(box);
        if (count + more > most || !(whole || box.children.length === 1)) continue;
        count += more;
        this.unfolded.add(box);
        level.push(...box.children);
      }
    }
  }

  added(box) { return this.unfolded.has(box) ? 0 : box.children.length; }

  // Show the first picture: the outermost modules.
  begin() {
    this.foldAll();
    this.unfoldWhile(FIRST, true);
  }
}

Object.assign(lib, {Fold});
})();

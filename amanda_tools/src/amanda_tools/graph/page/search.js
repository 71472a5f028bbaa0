"use strict";
// Search by an index that is made once: all facts of all nodes as one text.
(() => {
const lib = (globalThis.amandaGraph ??= {});

class Search {
  constructor(graph, counts) {
    this.counts = counts;
    this.starts = [];
    const lines = [];
    let length = 0;
    for (const node of graph.nodes) {
      const facts = lib.isOp(node)
        ? [node.name, node.type, node.word, node.module, node.source, node.id]
        : [node.name, node.kind];
      const line = facts.filter((fact) => fact).join("\t").toLowerCase().replaceAll("\n", " ");
      this.starts.push(length);
      lines.push(line);
      length += line.length + 1;
    }
    this.text = lines.join("\n") + "\n";
  }

  // Return the indices of the nodes that have all words; at most one pass over the text.
  find(query) {
    const words = query.toLowerCase().split(/\s+/).filter((word) => word);
    const found = [];
    if (!words.length) return found;
    // Of long words there are fewest.
    words.sort((a, b) => b.length - a.length);
    let node = 0, from = 0;
    for (;;) {
      const at = this.text.indexOf(words[0], from);
      this.counts.scanned += (at < 0 ? this.text.length : at) - from;
      if (at < 0) return found;
      node = this.nodeAt(at, node);
      const end = node + 1 < this.starts.length ? this.starts[node + 1] : this.text.length;
      const line = words.length > 1 ? this.text.slice(this.starts[node], end - 1) : "";
      this.counts.scanned += line.length;
      if (words.every((word, n) => n === 0 || line.includes(word))) found.push(node);
      from = end;
    }
  }

  nodeAt(position, least) {
    let low = least, high = this.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= position) low = middle; else high = middle - 1;
    }
    return low;
  }
}

Object.assign(lib, {Search});
})();

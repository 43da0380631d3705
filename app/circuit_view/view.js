
// The view itself: one object per mounted picture. `state` is what a link holds; the
// page may change it too, and the newer of the two counts (`seq`).

const views = new WeakMap();

class CircuitView {
  constructor(root) {
    this.root = root;
    this.find = (selector) => root.querySelector(selector);
    this.seq = 0;
    this.past = [];
    this.future = [];
    this.scale = null;
    this.wire();
  }

  // --- what comes in ---

  update(component) {
    this.emitTo = component.setStateValue;
    const data = component.data;
    const sig = JSON.stringify([data.id, data.names.length]);
    const fresh = sig !== this.sig;
    if (fresh) { this.past = []; this.future = []; this.scale = null; }
    this.sig = sig;
    this.data = data;
    this.plan = layout(data);
    this.find(".bar:not(.tools)").hidden = Boolean(data.side);
    this.curves = data.s.map((s, i) => curve(this.plan.boxes[s], this.plan.boxes[data.t[i]], data.p[i]));
    // While a slider moves, an answer to what was said before must not move it back.
    const sliding = this.before && !fresh;
    if (!this.state || (!sliding && (fresh || data.state.seq >= this.seq))) {
      this.before = null;
      this.state = JSON.parse(JSON.stringify(data.state));
      this.seq = Math.max(this.seq, data.state.seq);
    }
    this.redraw();
  }

  labels() {
    return this.data.labels || ["helps", "hurts"];
  }

  edgeName(i) {
    const { data } = this, port = ["", "q", "k", "v"][data.p[i]];
    return `${data.names[data.s[i]]}->${data.names[data.t[i]]}${port ? `<${port}>` : ""}`;
  }

  // --- what is shown ---

  /** Indices of the edges that the state keeps, best first. */
  kept() {
    const { data, state } = this;
    const hidden = new Set(state.hide);
    const limit = state.k + data.n_pins;
    let found = [];
    for (let i = 0; i < data.s.length; i++) {
      if (data.rank[i] >= limit) continue;
      if (hidden.size && (hidden.has(data.names[data.s[i]]) || hidden.has(data.names[data.t[i]]) || hidden.has(this.edgeName(i)))) continue;
      found.push(i);
    }
    // What the page cut to fit is pruned already, and may seem to dangle here.
    const whole = data.exact && state.k >= data.state.k;
    if (state.prune && !whole) found = this.connected(found);
    return found;
  }

  connected(edges) {
    const { data } = this;
    const fed = (t) => data.fed[t] || [t];
    const reached = this.closure(data.names.indexOf("input"), edges, (i) => [data.s[i]], (i) => fed(data.t[i]));
    const useful = this.closure(data.names.indexOf("logits"), edges, (i) => fed(data.t[i]), (i) => [data.s[i]]);
    const pin = (i) => data.rank[i] < data.n_pins;
    return edges.filter((i) => pin(i) || (reached.has(data.s[i]) && fed(data.t[i]).some((t) => useful.has(t))));
  }

  closure(start, edges, from, to) {
    const next = new Map();
    for (const i of edges) for (const a of from(i)) {
      if (!next.has(a)) next.set(a, []);
      next.get(a).push(...to(i));
    }
    const starts = Array.isArray(start) ? start : [start];
    const found = new Set(starts), waiting = [...starts];
    while (waiting.length) for (const b of next.get(waiting.pop()) || []) {
      if (!found.has(b)) { found.add(b); waiting.push(b); }
    }
    return found;
  }

  /** Only what lies on a path through a pinned component. */
  throughPins(edges) {
    const { data, state } = this;
    const pins = state.pins.map((name) => data.names.indexOf(name)).filter((i) => i >= 0);
    if (!state.through || !pins.length) return edges;
    const fed = (t) => data.fed[t] || [t];
    const after = this.closure(pins, edges, (i) => [data.s[i]], (i) => fed(data.t[i]));
    const before = this.closure(pins, edges, (i) => fed(data.t[i]), (i) => [data.s[i]]);
    return edges.filter((i) => after.has(data.s[i]) || fed(data.t[i]).some((t) => before.has(t)));
  }

  /** Lines to draw: edges, those between grouped components merged. */
  lines(edges, boxes) {
    const { data } = this;
    if (!this.groupOf.size) {
      return edges.map((i) => ({ i, s: data.s[i], t: data.t[i], port: data.p[i], v: data.v[i], side: data.side?.[i], curve: this.curves[i] }));
    }
    const merged = new Map();
    for (const i of edges) {
      const s = this.groupOf.get(data.s[i]) ?? data.s[i], t = this.groupOf.get(data.t[i]) ?? data.t[i];
      if (s === t) continue;
      const port = typeof t === "string" ? 0 : data.p[i], key = `${s}|${t}|${port}`;
      if (merged.has(key)) merged.get(key).v = (merged.get(key).v ?? 0) + (data.v[i] ?? 0);
      else merged.set(key, { i, s, t, port, v: data.v[i], side: data.side?.[i], curve: s === data.s[i] && t === data.t[i] ? this.curves[i] : curve(boxes(s), boxes(t), port) });
    }
    return [...merged.values()].sort((a, b) => Math.abs(b.v ?? 0) - Math.abs(a.v ?? 0));
  }

  groups() {
    const { data, plan, state } = this;
    this.groupOf = new Map();
    const found = new Map();
    for (const [name, members] of Object.entries(state.groups)) {
      const inside = members.map((m) => data.names.indexOf(m)).filter((i) => i >= 0);
      if (inside.length < 2) continue;
      const key = `group:${name}`, boxes = inside.map((i) => plan.boxes[i]);
      const mean = (of) => boxes.reduce((sum, box) => sum + of(box), 0) / boxes.length;
      const w = Math.max(40, 16 + 5.6 * name.length);
      found.set(key, { name, members: inside, box: { x: mean((b) => b.x + b.w / 2) - w / 2, y: mean((b) => b.y), w, h: 26 } });
      inside.forEach((i) => this.groupOf.set(i, key));
    }
    return found;
  }

  /** The picture as SVG elements' text, in a palette, with or without the focus. */
  content(palette, focused) {
    const { data, plan, state } = this;
    const groups = this.groups();
    const boxes = (id) => (typeof id === "string" ? groups.get(id).box : plan.boxes[id]);
    const kept = this.kept(), shown = this.throughPins(kept);
    const lines = this.lines(shown, boxes);
    this.vmost = Math.max(0, ...lines.map((line) => Math.abs(line.v ?? 0)));
    const near = focused ? this.near(shown) : null;
    const totals = new Map(), active = new Set();
    for (const line of lines) {
      active.add(line.s).add(line.t);
      if (typeof line.t === "number") (data.fed[line.t] || []).forEach((t) => active.add(this.groupOf.get(t) ?? t));
      totals.set(line.s, (totals.get(line.s) ?? 0) + (line.v ?? 0));
    }
    const most = Math.max(0, ...[...totals.values()].map(Math.abs));
    const pins = new Set(state.pins);
    const node = (id, box, name, kind, label) => nodeText({
      box, name, kind, label,
      active: active.has(id) || ["input", "logits"].includes(kind),
      total: totals.has(id) && !data.side ? totals.get(id) : null,
      share: most ? Math.sqrt(Math.abs(totals.get(id) ?? 0) / most) : 0,
      pinned: pins.has(name), selected: focused && state.sel === name,
      faded: near && !near.has(id) && state.sel !== name,
    }, palette);
    const singles = data.names.map((name, i) => (this.groupOf.has(i) ? "" : node(i, plan.boxes[i], name, data.kinds[i], data.kinds[i] === "kv" ? "" : name)));
    const grouped = [...groups].map(([id, g]) => node(id, g.box, id, "group", g.name));
    const mine = (line) => this.edgeName(line.i) === state.sel || [line.s, line.t].some((id) => data.names[id] === state.sel || id === state.sel);
    const faded = near ? (line) => !mine(line) : null;
    this.shown = { kept, shown, lines, active };
    return groundText(data, plan, palette) + edgesText(lines, this.vmost, palette, faded) + singles.join("") + grouped.join("");
  }

  /** Components beside what is selected; null where nothing is. */
  near(shown) {
    const { data, state } = this, found = new Set();
    if (!state.sel) return null;
    for (const i of shown) {
      const s = data.names[data.s[i]], t = data.names[data.t[i]];
      const group = (id) => this.groupOf.get(id) ?? id;
      if ([s, t, this.edgeName(i), group(data.s[i]), group(data.t[i])].includes(state.sel)) found.add(group(data.s[i])).add(group(data.t[i]));
    }
    return found.size ? found : null;
  }

  redraw() {
    const started = performance.now();
    const dark = this.isDark(), plan = this.plan;
    if (this.scale === null) this.fit();
    const drawing = this.content(dark ? DARK : LIGHT, true);
    const legend = legendText(plan, dark ? DARK : LIGHT, this.vmost, this.labels());
    const width = Math.max(plan.width, legend.width), height = plan.height + plan.legend;
    const inner = drawing + legend.text;
    const focus = this.root.getRootNode().activeElement?.dataset?.n;
    this.find(".sheet").innerHTML = `<svg role="group" aria-label="Circuit" width="${width * this.scale}" height="${height * this.scale}" viewBox="0 0 ${width} ${height}" font-family="${FONT}">${inner}</svg>`;
    const svg = this.find("svg");
    // The element that had the keyboard is gone: its successor takes over.
    if (focus) this.find(`[data-n="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
    this.said();
    this.controls();
    svg.dataset.k = this.state.k;
    svg.dataset.drawn = this.shown.lines.length;
    svg.dataset.ms = (performance.now() - started).toFixed(1);
  }

  isDark() {
    const host = this.root.getRootNode().host ?? this.root;
    const found = getComputedStyle(host).getPropertyValue("--st-background-color").trim();
    const rgbs = /^#/.test(found) ? found.slice(1).match(/../g).map((p) => parseInt(p, 16)) : (found.match(/\d+/g) || [255, 255, 255]).map(Number);
    return 0.3 * rgbs[0] + 0.59 * rgbs[1] + 0.11 * rgbs[2] < 110;
  }

  fit() {
    const room = this.find(".stage").clientWidth - 4;
    this.scale = Math.min(1.5, Math.max(0.62, room / this.plan.width));
  }

  said() {
    const { kept, shown, active } = this.shown, { data, state } = this;
    const known = state.k === data.state.k && data.exact ? data.kept : null;
    const count = (n) => n.toLocaleString("en-US");
    const whole = known ?? kept.length;
    let text = `<b>${count(whole)}</b> edges, <b>${count(active.size)}</b> components`;
    if (shown.length < kept.length) text += `, ${count(shown.length)} through the pins`;
    if (state.k + data.n_pins > whole && state.prune && !known) text += `; ${count(state.k + data.n_pins - whole)} dangling or hidden`;
    if (state.k > data.cap) text = `<span class="warn"><b>${count(shown.length)}</b> of ${count(known ?? state.k)} edges shown: raise the threshold</span>`;
    this.find(".said").innerHTML = text;
  }

  controls() {
    const { data, state } = this, set = (selector, value) => {
      const el = this.find(selector);
      if (this.root.getRootNode().activeElement !== el || el.type === "range") el.value = value;
    };
    set(".size", 1000 * Math.log1p(state.k) / Math.log1p(Math.max(1, data.n)));
    set(".count", state.k);
    this.find(".count").max = data.n;
    const key = this.keyAt(state.k), [low, high] = this.keyRange();
    this.find(".cut").disabled = !(high > 0);
    if (key > 0 && high > low) set(".cut", 1000 * Math.log(Math.max(key, low) / low) / Math.log(high / low));
    this.find(".cut-value").textContent = key === null ? "" : key.toPrecision(3);
    this.find(".undo").disabled = !this.past.length;
    this.find(".redo").disabled = !this.future.length;
    this.find(".pin").disabled = this.find(".hide").disabled = !state.sel || state.sel.startsWith("group:");
    this.find(".pin").textContent = state.pins.includes(state.sel) ? "Unpin" : "Pin";
    this.find(".hide").textContent = state.sel.startsWith("group:") ? "Ungroup" : "Hide";
    this.find(".hide").disabled = !state.sel || ["input", "logits"].includes(state.sel);
    this.find(".group").disabled = state.pins.filter((p) => !p.includes("->")).length < 2;
    this.find(".through").checked = state.through;
    this.find(".clear").disabled = !(state.pins.length || state.hide.length || Object.keys(state.groups).length);
  }

  // --- the threshold: the key of the last edge that is kept ---

  keyAt(k) {
    const keys = this.data.keys;
    if (!k || !keys.length) return null;
    let found = keys[0];
    for (const pair of keys) { if (pair[0] <= k) found = pair; }
    return found[1];
  }

  keyRange() {
    const good = this.data.keys.map((pair) => pair[1]).filter((key) => key > 0);
    return good.length ? [Math.min(...good) * 0.99, Math.max(...good)] : [0, 0];
  }

  sizeAbove(cut) {
    const { data } = this;
    let k = 0;
    for (const [size, key] of data.keys) if (key > cut) k = size;
    // Among the candidates the count is exact.
    const support = data.state.rank === "support";
    const near = data.exact ? [] : data.v.filter((v, i) => data.rank[i] >= data.n_pins && (support ? v : Math.abs(v)) > cut);
    return near.length && k < data.cap ? near.length : k;
  }

  // --- what the user does ---

  change(part, keep = true) {
    if (keep) { this.past.push(JSON.parse(JSON.stringify(this.before ?? this.state))); this.future = []; }
    this.before = null;
    Object.assign(this.state, part);
    this.emit();
  }

  emit() {
    this.state.seq = ++this.seq;
    this.redraw();
    this.emitTo("view", JSON.stringify(this.state));
  }

  /** While a slider moves: draw, and report only when it rests. */
  slide(k) {
    this.before ??= JSON.parse(JSON.stringify(this.state));
    this.state.k = Math.max(0, Math.min(this.data.n, k));
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.redraw());
  }

  step(from, to) {
    if (!from.length) return;
    to.push(JSON.parse(JSON.stringify(this.state)));
    this.state = from.pop();
    this.emit();
  }

  select(name) {
    if (name !== this.state.sel) this.change({ sel: name }, false);
  }

  togglePin(name) {
    if (!name || name.startsWith("group:")) return;
    const pins = this.state.pins.includes(name) ? this.state.pins.filter((p) => p !== name) : [...this.state.pins, name];
    this.change({ pins });
  }

  hideSelected() {
    const { sel } = this.state;
    if (sel.startsWith("group:")) {
      const groups = { ...this.state.groups };
      delete groups[sel.slice(6)];
      this.change({ groups, sel: "" });
    } else if (sel && !["input", "logits"].includes(sel)) {
      this.change({ hide: [...this.state.hide, sel], pins: this.state.pins.filter((p) => p !== sel), sel: "" });
    }
  }

  askGroup() {
    const field = this.find(".group-name");
    field.hidden = !field.hidden;
    if (!field.hidden) { field.value = ""; field.focus(); }
  }

  makeGroup(text) {
    const name = text.replace(/[:;,]/g, " ").trim();
    const members = this.state.pins.filter((p) => !p.includes("->"));
    this.find(".group-name").hidden = true;
    if (name && members.length > 1) {
      this.change({ groups: { ...this.state.groups, [name]: members }, pins: this.state.pins.filter((p) => p.includes("->")) });
    }
  }

  zoom(factor) {
    this.scale = Math.min(4, Math.max(0.2, this.scale * factor));
    this.redraw();
  }

  /** The edge nearest to a point on the screen, if it is near. */
  edgeAt(event) {
    const svg = this.find("svg"), box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / this.scale, y = (event.clientY - box.top) / this.scale;
    let best = null, nearest = (7 / this.scale) ** 2;
    for (const line of this.shown.lines) {
      const { x1, x2 } = line.curve;
      if (x < x1 - 8 || x > x2 + 8) continue;
      for (let t = 0; t <= 1; t += 0.04) {
        const [px, py] = line.curve.at(t), far = (px - x) ** 2 + (py - y) ** 2;
        if (far < nearest) { nearest = far; best = line; }
      }
    }
    return best;
  }

  nameAt(event) {
    const node = event.target.closest?.("[data-n]");
    if (node) return node.dataset.n;
    const own = event.target.dataset?.i;
    const line = own === undefined ? this.edgeAt(event) : this.shown.lines.find((l) => l.i === Number(own));
    return line ? this.edgeName(line.i) : "";
  }

  hover(event) {
    const tip = this.find(".tip"), name = this.nameAt(event);
    tip.hidden = !name;
    if (!name) return;
    tip.textContent = this.about(name);
    const box = this.root.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 220)}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  about(name) {
    const { data } = this;
    if (name.startsWith("group:")) return `${name.slice(6)}\n${this.state.groups[name.slice(6)].join(", ")}`;
    if (!name.includes("->")) {
      const count = (ends) => this.shown.shown.filter((i) => data.names[ends[i]] === name).length;
      return `${name}\n${count(data.t)} edges in, ${count(data.s)} out`;
    }
    const line = this.shown.lines.find((l) => this.edgeName(l.i) === name);
    if (!line || line.v === null) return name;
    const score = data.higher ? -line.v : line.v, error = data.e[line.i];
    const spread = error === null ? "" : ` ± ${error.toPrecision(2)}`;
    if (data.side) return `${name}\n${["only in", "in both", "only in"][data.side[line.i]]} ${[data.labels[0].slice(5), "", data.labels[1].slice(5)][data.side[line.i]]}`.trim();
    const place = data.rank[line.i] < data.n_pins ? "pinned" : `rank ${data.rank[line.i] - data.n_pins + 1} of ${data.n.toLocaleString("en-US")}`;
    return `${name}\nscore ${score.toPrecision(3)}${spread}, ${line.v >= 0 ? "helps" : "hurts"}\n${place}`;
  }

  async figure(kind) {
    const { plan, data } = this;
    const drawing = this.content(LIGHT, false);
    const legend = legendText(plan, LIGHT, this.vmost, this.labels());
    const width = Math.ceil(Math.max(plan.width, legend.width)), height = plan.height + plan.legend;
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${FONT}">`
      + `<rect width="${width}" height="${height}" fill="${LIGHT.paper}"/>${drawing}${legend.text}</svg>`;
    this.redraw();
    const name = `circuit-${data.id.slice(0, 8)}-${this.state.k}.${kind}`;
    if (kind === "svg") download(name, svg, "image/svg+xml");
    else if (kind === "pdf") download(name, pdfOf(svg, width, height), "application/pdf");
    else download(name, await pngOf(svg, width, height, 3), "image/png");
  }

  key(event) {
    if (event.target.tagName === "INPUT") return;
    const acts = {
      Escape: () => this.select(""), p: () => this.togglePin(this.state.sel), h: () => this.hideSelected(),
      z: () => this.step(this.past, this.future), Z: () => this.step(this.future, this.past),
      "+": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => { this.fit(); this.redraw(); },
      Enter: () => event.target.dataset?.n && this.select(event.target.dataset.n),
      g: () => this.find(".group").disabled || this.askGroup(),
    };
    if (acts[event.key] && !event.ctrlKey && !event.metaKey) { acts[event.key](); event.preventDefault(); }
  }

  wire() {
    const on = (selector, type, act) => this.find(selector).addEventListener(type, act);
    const scaled = (el) => Math.round(Math.expm1((el.value / 1000) * Math.log1p(Math.max(1, this.data.n))));
    const above = (el) => { const [low, high] = this.keyRange(); return this.sizeAbove(low * (high / low) ** (el.value / 1000) * (1 - 1e-9)); };
    on(".size", "input", (e) => this.slide(scaled(e.target)));
    on(".cut", "input", (e) => this.slide(above(e.target)));
    // A slider that is put back where it was fires no change: it still came to rest.
    const rest = () => this.before && this.change({});
    for (const slider of [".size", ".cut"]) {
      for (const end of ["change", "pointerup", "blur"]) on(slider, end, rest);
    }
    on(".count", "change", (e) => { this.slide(parseInt(e.target.value || "0", 10)); this.change({}); });
    on(".undo", "click", () => this.step(this.past, this.future));
    on(".redo", "click", () => this.step(this.future, this.past));
    on(".pin", "click", () => this.togglePin(this.state.sel));
    on(".hide", "click", () => this.hideSelected());
    on(".group", "click", () => this.askGroup());
    on(".group-name", "keydown", (e) => { if (e.key === "Enter") this.makeGroup(e.target.value); if (e.key === "Escape") e.target.hidden = true; });
    on(".through", "change", (e) => this.change({ through: e.target.checked }));
    on(".clear", "click", () => this.change({ pins: [], hide: [], groups: {}, through: false }));
    on(".in", "click", () => this.zoom(1.25));
    on(".out", "click", () => this.zoom(0.8));
    on(".fit", "click", () => { this.fit(); this.redraw(); });
    for (const kind of ["png", "svg", "pdf"]) on(`.${kind}`, "click", () => this.figure(kind));
    on(".sheet", "click", (e) => {
      const name = this.nameAt(e);
      if (e.shiftKey) this.togglePin(name);
      else this.select(name === this.state.sel ? "" : name);
    });
    on(".stage", "mousemove", (e) => this.hover(e));
    on(".stage", "mouseleave", () => { this.find(".tip").hidden = true; });
    on(".stage", "wheel", (e) => { if (e.ctrlKey || e.metaKey) { e.preventDefault(); this.zoom(e.deltaY < 0 ? 1.1 : 0.9); } });
    this.root.addEventListener("keydown", (e) => this.key(e));
  }
}

export default function (component) {
  const root = component.parentElement.querySelector(".cv");
  if (!root || !component.data) return;
  if (!views.has(root)) views.set(root, new CircuitView(root));
  views.get(root).update(component);
}

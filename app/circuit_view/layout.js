// Where things stand and how a circuit becomes SVG text. Knows no event and no state of
// the page: everything comes in as arguments.

const FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif";
const DASH = ["", "", "6 3.5", "1.6 2.6"]; // in, q, k, v
const LIGHT = {
  paper: "#ffffff", ink: "#1d2733", muted: "#6b7785", faint: "#ccd4dd", band: "#f6f8fa",
  helps: "#1f5fa8", hurts: "#c4472b", plain: "#5a6676", pin: "#b7791f",
};
const DARK = {
  paper: "#10151c", ink: "#e3e9f0", muted: "#93a0af", faint: "#38434f", band: "#161d26",
  helps: "#6ea8e6", hurts: "#f0885f", plain: "#9aa7b5", pin: "#e8b45a",
};

function escaped(text) {
  return String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

function short(number) {
  return Number(number.toFixed(2));
}

/** Boxes of every component: {x, y, w, h} with x the left side and y the middle. */
function layout(data) {
  const longest = Math.max(...data.names.map((name) => name.length));
  const w = 12 + 5.6 * longest;
  const grouped = data.kinds.includes("kv");
  const unsplit = data.kinds.includes("attention");
  const needed = w + Math.max(34, w * 0.55) + (grouped ? 16 : 0) + (unsplit ? w : 0);
  // Few layers spread out, so that their lines have room.
  const column = Math.round(Math.max(needed, Math.min(needed * 2, 780 / data.n_layers)));
  const left = 54 + Math.max(30, (column - w) * 0.55) + (grouped ? 12 : 0);
  const row = 27, top = 42, heads = data.n_heads;
  const mlpRow = top + heads * row + 16;
  const middle = top + ((heads - 1) * row) / 2;
  const per = grouped ? heads / data.kinds.filter((k, i) => k === "kv" && data.layers[i] === 0).length : 1;
  const boxes = data.kinds.map((kind, i) => {
    const x = left + (data.layers[i] || 0) * column;
    const head = data.heads[i] || 0;
    if (kind === "input") return { x: 10, y: middle, w: 44, h: 22 };
    if (kind === "logits") return { x: left + data.n_layers * column + 6, y: middle, w: 46, h: 22 };
    if (kind === "mlp") return { x: x + Math.max(w * 0.62, column * 0.36) + (unsplit ? w : 0), y: mlpRow, w: Math.max(30, w * 0.8), h: 20 };
    if (kind === "attention") return { x: x + w + 8, y: middle, w, h: 19 };
    if (kind === "kv") return { x: x - 13, y: top + (head * per + (per - 1) / 2) * row, w: 7, h: (per - 1) * row + 18 };
    return { x, y: top + head * row, w, h: 18 };
  });
  const last = boxes[data.kinds.indexOf("logits")];
  return { boxes, column, left, top, w, indent: grouped ? 24 : Math.min(26, (column - w) * 0.3), width: last.x + last.w + 14, height: mlpRow + 30, legend: 34 };
}

/** The centre line of an edge, entering a head by its port: q above, k amid, v below. */
function curve(from, to, port) {
  const x1 = from.x + from.w, y1 = from.y;
  const tall = to.h > 30 ? to.h * 0.22 : 5;
  const x2 = to.x - 5, y2 = to.y + [0, -tall, 0, tall][port] + (to.w < 10 ? [0, 0, -6, 6][port] : 0);
  const reach = Math.max(22, Math.abs(x2 - x1) * 0.45);
  return {
    x1, y1, x2, y2,
    d: `M${short(x1)} ${short(y1)}C${short(x1 + reach)} ${short(y1)} ${short(x2 - reach)} ${short(y2)} ${short(x2)} ${short(y2)}`,
    // Points along the line, to find the edge that is nearest to the pointer.
    at(t) {
      const u = 1 - t, a = u * u * u, b = 3 * u * u * t, c = 3 * u * t * t, e = t * t * t;
      return [a * x1 + b * (x1 + reach) + c * (x2 - reach) + e * x2, (a + b) * y1 + (c + e) * y2];
    },
  };
}

function strength(value, most) {
  return value === null || !most ? 0.16 : Math.sqrt(Math.min(1, Math.abs(value) / most));
}

function colour(value, palette) {
  return value === null ? palette.plain : value >= 0 ? palette.helps : palette.hurts;
}

/** Which way a line is drawn: 1 an arrow, −1 a bar, 0 plain. A comparison's first run
 * is drawn as an arrow, its second as a bar, and what both have plain. */
function signOf(line) {
  if (line.side !== undefined) return [1, 0, -1][line.side];
  return line.v === null ? 0 : line.v >= 0 ? 1 : -1;
}

/** Edges as SVG text, the strongest on top, each line's end told by its sign. */
function edgesText(lines, most, palette, faded) {
  const parts = [], arrows = [[], [], []], bars = [[], [], []];
  // Where there are many, the weak ones step back.
  const crowd = Math.min(1, Math.sqrt(350 / Math.max(1, lines.length)));
  for (const line of [...lines].reverse()) {
    const s = strength(line.v, most);
    const width = short(0.7 + 5 * s);
    const away = faded && faded(line);
    const opacity = away ? 0.07 : short(0.4 * crowd + (0.9 - 0.4 * crowd) * s);
    const dash = DASH[line.port] ? ` stroke-dasharray="${DASH[line.port]}"` : "";
    parts.push(`<path data-i="${line.i}" d="${line.curve.d}" stroke="${[palette.hurts, palette.plain, palette.helps][signOf(line) + 1]}" stroke-width="${width}" stroke-opacity="${opacity}"${dash}/>`);
    if (away) continue;
    const size = 2.4 + 2.6 * s, { x2, y2 } = line.curve;
    const level = s < 0.2 ? 0 : s < 0.45 ? 1 : 2;
    if (signOf(line) < 0) bars[level].push(`M${short(x2 + 1.5)} ${short(y2 - size)}V${short(y2 + size)}`);
    else if (signOf(line) > 0) arrows[level].push(`M${short(x2 + 4.5)} ${short(y2)}L${short(x2 - 1)} ${short(y2 - size)}V${short(y2 + size)}Z`);
  }
  const ends = [0.5, 0.75, 1].map((opacity, level) =>
    `<path class="ends" d="${arrows[level].join("")}" fill="${palette.helps}" fill-opacity="${opacity}"/>`
    + `<path class="ends" d="${bars[level].join("")}" stroke="${palette.hurts}" stroke-width="1.7" stroke-opacity="${opacity}" fill="none"/>`);
  return `<g class="edges" fill="none">${parts.join("")}</g>${ends.join("")}`;
}

function nodeText(node, palette) {
  const { box, name, kind, total, active, pinned, selected, faded, label } = node;
  if (!active) {
    if (kind === "kv") return "";
    return `<circle data-n="${escaped(name)}" cx="${short(box.x + box.w / 2)}" cy="${short(box.y)}" r="1.7" fill="${palette.faint}"/>`;
  }
  const x = short(box.x), y = short(box.y - box.h / 2), w = short(box.w), h = short(box.h);
  const round = { mlp: 3, kv: 3, head: 7, attention: 7, group: 9 }[kind] ?? 11;
  const tint = total === null ? "" : `<rect x="${x}" y="${y}" width="${w}" height="${h}" rx="${round}" fill="${colour(total, palette)}" fill-opacity="${short(0.05 + 0.3 * node.share)}"/>`;
  const line = selected ? palette.ink : pinned ? palette.pin : kind === "group" ? palette.ink : palette.muted;
  const width = selected ? 2.2 : pinned ? 2 : kind === "group" ? 1.4 : 0.9;
  const dash = kind === "group" ? ` stroke-dasharray="4 2"` : "";
  const text = kind === "kv" ? "" : `<text x="${short(box.x + box.w / 2)}" y="${short(box.y + 3.4)}" text-anchor="middle" font-size="${label.length > 8 && kind !== "group" ? 8.5 : 10}" fill="${palette.ink}">${escaped(label)}</text>`;
  const mark = pinned ? `<circle cx="${short(box.x + box.w - 2)}" cy="${y}" r="3" fill="${palette.pin}" stroke="${palette.paper}"/>` : "";
  const opacity = faded ? ` opacity="0.3"` : "";
  return `<g class="node" data-n="${escaped(name)}" tabindex="0" role="button" aria-label="${escaped(name)}"${opacity}>`
    + `<rect x="${x}" y="${y}" width="${w}" height="${h}" rx="${round}" fill="${palette.paper}" stroke="${line}" stroke-width="${width}"${dash}/>${tint}${text}${mark}</g>`;
}

/** Layers as bands with their numbers above. */
function groundText(data, plan, palette) {
  const parts = [];
  for (let l = 0; l < data.n_layers; l++) {
    const x = plan.left + l * plan.column - plan.indent;
    if (l % 2 === 0) parts.push(`<rect x="${short(x)}" y="24" width="${plan.column}" height="${short(plan.height - 30)}" rx="5" fill="${palette.band}"/>`);
    parts.push(`<text x="${short(x + plan.column / 2)}" y="16" text-anchor="middle" font-size="10" fill="${palette.muted}">${l}</text>`);
  }
  parts.push(`<text x="32" y="16" text-anchor="middle" font-size="10" fill="${palette.muted}">layer</text>`);
  return parts.join("");
}

/** What lines mean, along the bottom: nothing rests on colour alone. */
function legendText(plan, palette, most, labels) {
  const y = plan.height + 12, parts = [];
  let x = 14;
  const item = (draw, text) => {
    parts.push(draw(x), `<text x="${x + 32}" y="${y + 3.4}" font-size="10" fill="${palette.muted}">${escaped(text)}</text>`);
    x += 42 + text.length * 5.2;
  };
  const line = (at, stroke, width, dash) => `<path d="M${at} ${y}H${at + 24}" stroke="${stroke}" stroke-width="${width}" fill="none"${dash ? ` stroke-dasharray="${dash}"` : ""}/>`;
  item((at) => line(at, palette.helps, 2.2) + `<path d="M${at + 28} ${y}l-6 -4v8Z" fill="${palette.helps}"/>`, labels[0]);
  item((at) => line(at, palette.hurts, 2.2) + `<path d="M${at + 26} ${y - 5}v10" stroke="${palette.hurts}" stroke-width="1.8" fill="none"/>`, labels[1]);
  if (labels[2]) item((at) => line(at, palette.plain, 2.2), labels[2]);
  item((at) => line(at, palette.plain, 1.8), "query, MLP, logits");
  item((at) => line(at, palette.plain, 1.8, DASH[2]), "key");
  item((at) => line(at, palette.plain, 1.8, DASH[3]), "value");
  if (most) {
    item((at) => line(at, palette.plain, 0.7 + 5 * Math.sqrt(0.1)), `|score| ${(most * 0.1).toPrecision(2)}`);
    item((at) => line(at, palette.plain, 5.7), most.toPrecision(2));
  }
  return { text: parts.join(""), width: x };
}

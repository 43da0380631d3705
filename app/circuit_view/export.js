
// A picture as a file: SVG text as it is, PNG through a canvas, PDF by hand.

function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function pngOf(svg, width, height, scale) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function rgb(colour) {
  const found = /^#(..)(..)(..)$/.exec(colour || "");
  return found ? found.slice(1).map((part) => (parseInt(part, 16) / 255).toFixed(3)).join(" ") : "0 0 0";
}

/** SVG path data as PDF operators; knows the commands that layout.js writes. */
function pdfPath(d) {
  const words = d.match(/[MLHVCZlv]|-?[\d.]+(?:e-?\d+)?/g) || [];
  const parts = [];
  let at = 0, x = 0, y = 0, verb = "M";
  const number = () => parseFloat(words[at++]);
  while (at < words.length) {
    if (/[A-Za-z]/.test(words[at])) verb = words[at++];
    if (verb === "Z") { parts.push("h"); continue; }
    if (verb === "C") {
      const p = [number(), number(), number(), number(), number(), number()];
      [x, y] = [p[4], p[5]];
      parts.push(`${p.join(" ")} c`);
      continue;
    }
    if (verb === "M" || verb === "L") [x, y] = [number(), number()];
    else if (verb === "l") [x, y] = [x + number(), y + number()];
    else if (verb === "H") x = number();
    else if (verb === "V") y = number();
    else if (verb === "v") y += number();
    parts.push(`${short(x)} ${short(y)} ${verb === "M" ? "m" : "l"}`);
    if (verb === "M") verb = "L";
  }
  return parts.join(" ");
}

function pdfRound(x, y, w, h, r) {
  r = Math.min(r, w / 2, h / 2);
  const k = r * 0.4477;
  return `${x + r} ${y} m ${x + w - r} ${y} l ${x + w - k} ${y} ${x + w} ${y + k} ${x + w} ${y + r} c `
    + `${x + w} ${y + h - r} l ${x + w} ${y + h - k} ${x + w - k} ${y + h} ${x + w - r} ${y + h} c `
    + `${x + r} ${y + h} l ${x + k} ${y + h} ${x} ${y + h - k} ${x} ${y + h - r} c `
    + `${x} ${y + r} l ${x} ${y + k} ${x + k} ${y} ${x + r} ${y} c h`;
}

function pdfShape(el) {
  const a = (name) => parseFloat(el.getAttribute(name) || "0");
  if (el.tagName === "path") return pdfPath(el.getAttribute("d"));
  if (el.tagName === "circle") {
    return pdfRound(a("cx") - a("r"), a("cy") - a("r"), 2 * a("r"), 2 * a("r"), a("r"));
  }
  return pdfRound(a("x"), a("y"), a("width"), a("height"), a("rx") || 0.01);
}

/** One page with what the SVG shows, as PDF 1.4 text: vector lines, Helvetica. */
function pdfOf(svg, width, height) {
  const root = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  const pen = document.createElement("canvas").getContext("2d");
  const states = new Map(), parts = [`1 0 0 -1 0 ${height} cm`];
  const alpha = (stroke, fill) => {
    const key = `/CA ${stroke} /ca ${fill}`;
    if (!states.has(key)) states.set(key, `G${states.size}`);
    return `/${states.get(key)} gs`;
  };
  const text = (el, opacity) => {
    const size = parseFloat(el.getAttribute("font-size") || "10");
    pen.font = `${size}px Helvetica, Arial, 'Liberation Sans', sans-serif`;
    const wide = pen.measureText(el.textContent).width;
    const x = parseFloat(el.getAttribute("x")) - (el.getAttribute("text-anchor") === "middle" ? wide / 2 : 0);
    const said = el.textContent.replace(/[\u2212\u2013]/g, "-").replace(/[^\x20-\xff]/g, "?").replace(/[\\()]/g, "\\$&");
    parts.push(`${alpha(1, opacity)} BT ${rgb(el.getAttribute("fill"))} rg /F1 ${size} Tf 1 0 0 -1 ${short(x)} ${el.getAttribute("y")} Tm (${said}) Tj ET`);
  };
  const walk = (el, style) => {
    const own = {
      fill: el.getAttribute("fill") || style.fill,
      opacity: style.opacity * parseFloat(el.getAttribute("opacity") || "1"),
    };
    if (el.tagName === "text") return text(el, own.opacity);
    if (["path", "rect", "circle"].includes(el.tagName)) {
      const stroke = el.getAttribute("stroke"), fill = own.fill !== "none" && own.fill;
      if (el.tagName === "path" && !el.getAttribute("d")) return undefined;
      const faint = (name) => (own.opacity * parseFloat(el.getAttribute(name) || "1")).toFixed(2);
      const dash = (el.getAttribute("stroke-dasharray") || "").trim();
      parts.push("q", alpha(faint("stroke-opacity"), faint("fill-opacity")));
      if (fill) parts.push(`${rgb(fill)} rg`);
      if (stroke) parts.push(`${rgb(stroke)} RG ${el.getAttribute("stroke-width") || 1} w [${dash}] 0 d`);
      parts.push(pdfShape(el), stroke && fill ? "B" : stroke ? "S" : "f", "Q");
      return undefined;
    }
    for (const child of el.children) walk(child, own);
    return undefined;
  };
  walk(root, { fill: "#000000", opacity: 1 });
  return pdfFile(parts.join("\n"), states, width, height);
}

function pdfFile(content, states, width, height) {
  const graphics = [...states].map(([key, name]) => `/${name} << ${key} >>`).join(" ");
  const bytes = (text) => Uint8Array.from(text, (c) => c.charCodeAt(0) & 255);
  const objects = [
    "<< /Type /Catalog /Pages 2 0 R >>",
    "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
    `<< /Type /Page /Parent 2 0 R /MediaBox [0 0 ${width} ${height}] /Contents 4 0 R `
      + `/Resources << /Font << /F1 5 0 R >> /ExtGState << ${graphics} >> >> >>`,
    `<< /Length ${content.length} >>\nstream\n${content}\nendstream`,
    "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
  ];
  let file = "%PDF-1.4\n";
  const starts = objects.map((body, i) => {
    const start = file.length;
    file += `${i + 1} 0 obj\n${body}\nendobj\n`;
    return start;
  });
  const table = starts.map((at) => `${String(at).padStart(10, "0")} 00000 n \n`).join("");
  const end = file.length;
  file += `xref\n0 ${objects.length + 1}\n0000000000 65535 f \n${table}trailer\n`
    + `<< /Size ${objects.length + 1} /Root 1 0 R >>\nstartxref\n${end}\n%%EOF\n`;
  return bytes(file);
}

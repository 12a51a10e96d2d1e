// Charts that are drawn by a pen: on a canvas for the screen and PNG, as SVG for a file.
import { $, color, el, save, shown } from "./page.js";

class CanvasPen {
  constructor(ctx) { this.ctx = ctx; }
  style(fill, stroke, alpha, width) { const c = this.ctx; c.globalAlpha = alpha; c.fillStyle = fill; c.strokeStyle = stroke; c.lineWidth = width; }
  rect(x, y, w, h, fill, alpha = 1) { this.style(fill, fill, alpha, 1); this.ctx.fillRect(x, y, w, h); }
  line(points, stroke, width = 1, alpha = 1) {
    this.style("", stroke, alpha, width);
    this.ctx.beginPath();
    points.forEach(([x, y], at) => at ? this.ctx.lineTo(x, y) : this.ctx.moveTo(x, y));
    this.ctx.stroke();
  }
  circle(x, y, r, fill, ring, alpha = 1) { this.style(fill, ring || fill, alpha, 1.5); this.ctx.beginPath(); this.ctx.arc(x, y, r, 0, 7); this.ctx.fill(); if (ring) this.ctx.stroke(); }
  text(x, y, words, fill, anchor = "start", turn = 0) {
    const c = this.ctx;
    this.style(fill, fill, 1, 1);
    c.textAlign = anchor === "middle" ? "center" : anchor;
    c.save(); c.translate(x, y); c.rotate(turn); c.fillText(words, 0, 0); c.restore();
  }
}
class SvgPen {
  constructor(w, h) { this.root = this.node("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${w} ${h}`, width: w, height: h, "font-family": "sans-serif", "font-size": 12 }); }
  node(tag, attrs) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attrs)) made.setAttribute(k, v);
    if (this.root) this.root.append(made);
    return made;
  }
  rect(x, y, width, height, fill, alpha = 1) { this.node("rect", { x, y, width, height, fill, "fill-opacity": alpha }); }
  line(points, stroke, width = 1, alpha = 1) { this.node("polyline", { points: points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "), fill: "none", stroke, "stroke-width": width, "stroke-opacity": alpha }); }
  circle(cx, cy, r, fill, ring, alpha = 1) { this.node("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r, fill, stroke: ring || "none", "fill-opacity": alpha }); }
  text(x, y, words, fill, anchor = "start", turn = 0) { this.node("text", { x, y, fill, "text-anchor": anchor, ...(turn ? { transform: `rotate(${turn * 57.2958} ${x} ${y})` } : {}) }).textContent = words; }
}

/* A canvas that is drawn again when its width or the colors change. ``draw(pen, w, h)`` draws all of it. */
export function chart(label, height, draw) {
  const canvas = el("canvas", { class: "plot", tabindex: "0", role: "img", "aria-label": label });
  canvas.style.height = `${height}px`;
  const size = () => [Math.max(280, canvas.clientWidth || 1100), height];
  canvas.redraw = () => {
    if (!canvas.isConnected) return;
    const [w, h] = size(), dense = window.devicePixelRatio || 1, ctx = canvas.getContext("2d");
    canvas.width = w * dense; canvas.height = h * dense;
    ctx.setTransform(dense, 0, 0, dense, 0, 0);
    ctx.font = "12px system-ui, sans-serif";
    draw(new CanvasPen(ctx), w, h);
  };
  canvas.svg = () => {
    const [w, h] = size(), pen = new SvgPen(w, h);
    pen.rect(0, 0, w, h, color("--panel"));
    draw(pen, w, h);
    return new XMLSerializer().serializeToString(pen.root);
  };
  canvas.size = size;
  new ResizeObserver(() => canvas.redraw()).observe(canvas);
  return canvas;
}
export function savers(name, canvas, more) {
  const png = () => {
    const copy = el("canvas", { width: canvas.width, height: canvas.height }), ctx = copy.getContext("2d");
    ctx.fillStyle = color("--panel"); ctx.fillRect(0, 0, copy.width, copy.height); ctx.drawImage(canvas, 0, 0);
    copy.toBlob((blob) => save(`${name}.png`, blob));
  };
  return el("span", { class: "tools" }, el("button", { type: "button", class: "small", text: "PNG", onclick: png }),
    el("button", { type: "button", class: "small", text: "SVG", onclick: () => save(`${name}.svg`, new Blob([canvas.svg()], { type: "image/svg+xml" })) }), ...(more || []));
}
export function scale({ low, high, log }, from, to) {
  const f = log ? Math.log : (v) => v, a = f(low), b = f(high) === f(low) ? f(low) + 1 : f(high), g = log ? Math.exp : (v) => v;
  const at = (v) => from + (f(v) - a) / (b - a) * (to - from);
  at.back = (p) => g(a + (p - from) / (to - from) * (b - a));
  at.ticks = (n) => {
    if (log && high / low > 8) {
      const all = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) for (const m of high / low > 1e3 ? [1] : [1, 2, 5]) all.push(m * 10 ** e);
      return all.filter((v) => v >= low * 0.999 && v <= high * 1.001);
    }
    const step0 = ((high - low) || 1) / n, p = 10 ** Math.floor(Math.log10(step0)), m = step0 / p, step = (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10) * p, all = [];
    for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) all.push(v);
    return all;
  };
  return at;
}
export function axes(pen, w, h, X, Y, box, xName, yName, spoken) {
  const line = color("--line"), dim = color("--dim"), word = (name, v, words) => words ? (Number.isInteger(v) ? words[v] || "" : "") : shown(name, v);
  for (const v of X.ticks(Math.max(2, w / 170))) { pen.line([[X(v), box.t], [X(v), h - box.b]], line); pen.text(X(v), h - box.b + 16, word(xName, v, spoken[0]), dim, "middle"); }
  for (const v of Y.ticks(6)) { pen.line([[box.l, Y(v)], [w - box.r, Y(v)]], line); pen.text(box.l - 6, Y(v) + 4, word(yName, v, spoken[1]), dim, "end"); }
  pen.text((box.l + w - box.r) / 2, h - 6, xName, dim, "middle");
  pen.text(13, (box.t + h - box.b) / 2, yName, dim, "middle", -Math.PI / 2);
}
export function showTip(event, title, facts) {
  const tip = $("tip");
  tip.replaceChildren(el("b", { text: title }), ...facts.map(([k, v]) => el("div", {}, el("span", { text: k }), el("span", { text: v }))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 16 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : event.clientY + 16}px`;
}
export const hideTip = () => { $("tip").hidden = true; };

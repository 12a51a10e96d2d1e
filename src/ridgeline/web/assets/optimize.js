"use strict";
// The receipt of an optimization: cards, the way down, the table of candidates, kernels before and after.

const R = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const STATUS = { winner: "var(--good)", beaten: "var(--accent)", equal: "var(--other)", slower: "var(--latency)", wrong: "var(--bad)", "too large": "var(--issue)", failed: "var(--bad)", skipped: "var(--other)" };

function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
  for (const child of children) node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return node;
}
function scaled(value, steps) {
  const [scale, unit] = steps.find(([s]) => Math.abs(value) >= s) || steps[steps.length - 1];
  const v = value / scale;
  return `${Math.abs(v) >= 999.5 ? Math.round(v).toLocaleString("en-US") : Number(v.toPrecision(3))} ${unit}`;
}
const known = (v) => v !== null && v !== undefined;
const seconds = (v) => !known(v) ? "" : v === 0 ? "0 s" : scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
const bytes = (v) => !known(v) ? "" : scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const times = (v, digits = 2) => known(v) ? `${v.toFixed(digits)}×` : "";
const small = (v) => known(v) ? v.toExponential(1) : "∞";

function card(label, value, ...subs) {
  return el("div", { class: "card" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value),
    ...subs.filter(Boolean).map((sub) => el("div", { class: "sub" }, sub)));
}
function heading() {
  $("title").append(R.model, el("span", { class: "on" }, " on "), R.device);
  const word = R.mode === "train" ? "training step" : "inference";
  $("subtitle").textContent = `${word} · inputs ${R.inputs} · kept: ${R.winner}`;
}
function cards() {
  const found = [
    card("a call", seconds(R.final_s), `eager ${seconds(R.eager_s)}`, known(R.stock_s) ? `torch.compile ${seconds(R.stock_s)}` : "torch.compile was not measured"),
    card("against eager", times(R.speedup), `between ${times(R.speedup_low)} and ${times(R.speedup_high)}, 95 % confidence`, R.stock_s ? `${times(R.over_best)} the better of eager and torch.compile` : "torch.compile was not measured: nothing is claimed against it"),
  ];
  if (R.floor_s) found.push(card("above the floor", times(R.final_s / R.floor_s), `the hardware allows ${seconds(R.floor_s)}`, `eager is at ${times(R.eager_s / R.floor_s)}`));
  if (known(R.final_bytes)) found.push(card("peak memory", bytes(R.final_bytes), `eager ${bytes(R.eager_bytes)}`, R.memory_limit_bytes ? `limit ${bytes(R.memory_limit_bytes)}` : ""));
  if (R.verdict) found.push(card("error", small(R.verdict.rms_frac), `eager's own is ${small(R.verdict.eager_rms_frac)}`, `${small(R.verdict.allowed_rms_frac)} is allowed, against ${R.verdict.reference}`));
  found.push(card("searched", `${R.spent_s.toFixed(1)} s`, `of ${R.budget_s.toFixed(0)} s`, R.cached ? "remembered from an earlier search" : ""));
  $("cards").replaceChildren(...found);
}
function way() {
  const longest = Math.max(...R.steps.map((step) => step.measured_s));
  let before = longest;
  const share = (s) => `${(100 * s / longest).toFixed(2)}%`;
  for (const step of R.steps) {
    const track = el("div", { class: "track" });
    const saved = Math.max(0, before - step.measured_s);
    track.append(el("i", { style: `left:0;width:${share(step.measured_s)};background:var(--accent)` }));
    track.append(el("i", { style: `left:${share(step.measured_s)};width:${share(saved)};background:color-mix(in srgb, var(--good) 35%, var(--soft))` }));
    if (R.floor_s && R.floor_s <= longest) track.append(el("i", { class: "floor", style: `left:${share(R.floor_s)}` }));
    const facts = el("div", { class: "facts" }, el("b", {}, seconds(step.measured_s)), saved ? el("span", { class: "better" }, `  −${seconds(saved)}`) : "");
    $("way").append(el("div", { class: "way" }, el("div", {}, step.name), track, facts));
    before = step.measured_s;
  }
  $("way").append(el("p", { class: "dim" }, `What the result does: ${R.changes.join("; ")}.`));
  if (R.guarantee) $("way").append(el("p", {}, `Guarantee: ${R.guarantee}.`));
}
function proof() {
  const v = R.verdict;
  if (!v) { $("proof").append(el("p", {}, "The result is the eager model itself: nothing was changed.")); return; }
  const rows = [
    ["compared", `${v.num_compared} results of fresh inputs (outputs, changed inputs and buffers, gradients in training) against ${v.reference}`],
    ["worst of them", v.what],
    ["root mean square error", `${small(v.rms_frac)}; eager's own ${small(v.eager_rms_frac)}; allowed ${small(v.allowed_rms_frac)}`],
    ["largest error", `${small(v.largest)}; eager's own ${small(v.eager_largest)}; allowed ${small(v.allowed_largest)}`],
  ];
  $("proof").append(el("table", { class: "plain" }, ...rows.map(([k, text]) => el("tr", {}, el("td", { class: "dim" }, k), el("td", {}, text)))));
}
function tried() {
  const head = ["candidate", "status", "time", "× eager", "predicted", "memory", "built in", "error", "why"];
  $("tried").append(el("tr", {}, ...head.map((name, i) => el("th", i >= 2 && i <= 7 ? { class: "num" } : {}, name))));
  for (const e of R.entries) {
    const interval = known(e.speedup_low) && e.speedup_low !== e.speedup_high ? ` (${e.speedup_low.toFixed(2)}–${e.speedup_high.toFixed(2)})` : "";
    const cells = [seconds(e.measured_s), known(e.speedup) ? times(e.speedup) + interval : "", seconds(e.predicted_s), bytes(e.peak_bytes), known(e.build_s) ? `${e.build_s.toFixed(1)} s` : "", e.verdict ? small(e.verdict.rms_frac) : ""];
    const name = el("td", {}, e.name, el("div", { class: "dim" }, e.changes.join("; ")));
    const status = el("td", {}, el("span", { class: "status", style: `background:${STATUS[e.status] || "var(--other)"}` }, e.status));
    $("tried").append(el("tr", e.status === "winner" ? { class: "winner" } : {}, name, status, ...cells.map((text) => el("td", { class: "num" }, text)), el("td", { class: "why" }, e.reason)));
  }
}
function narrowed() {
  const rows = R.narrowed || [];
  if (!rows.length) { $("narrowed-panel").hidden = true; return; }
  $("narrowed-text").textContent = `Within an error_budget of ${R.error_budget}, the relative root mean square error that results may have. An error at a layer is measured on its own inputs; at the outputs it is that times the share which arrives there, measured by changing one layer alone. Squares add.`;
  $("narrowed").append(el("tr", {}, ...["layer", "format", "error at the layer", "at the outputs", "gain", "told by"].map((name, i) => el("th", i >= 2 && i <= 4 ? { class: "num" } : {}, name))));
  for (const r of rows) {
    const numbers = [small(r.local_frac), small(r.error_frac), seconds(r.gain_s)].map((text) => el("td", { class: "num" }, text));
    $("narrowed").append(el("tr", {}, el("td", {}, r.name), el("td", {}, r.format), ...numbers, el("td", { class: "dim" }, r.basis)));
  }
}
function parts() {
  const rows = R.parts || [];
  if (!rows.length) { $("parts-panel").hidden = true; return; }
  const lanes = [["eager", "eager_s", "var(--other)"], ["result", "final_s", "var(--good)"]];
  $("parts-legend").replaceChildren(...lanes.map(([name, , color]) => el("span", {}, el("i", { style: `background:${color}` }), name)),
    ...(rows.some((p) => known(p.floor_s)) ? [el("span", {}, el("i", { style: "background:var(--ink);width:2px" }), "floor")] : []));
  const longest = Math.max(...rows.flatMap((p) => [p.eager_s, p.final_s || 0]), 1e-12);
  const share = (s) => `${(100 * s / longest).toFixed(2)}%`;
  const head = ["part", "", "eager", "result", "floor", "left", "told by", "what would close it"];
  $("parts").append(el("tr", {}, ...head.map((name, i) => el("th", i >= 2 && i <= 5 ? { class: "num" } : {}, name))));
  for (const p of rows) {
    const bars = el("div", { class: "bars" }, ...lanes.map(([, key, color]) => el("div", { class: "lane", style: `background:${color};width:${share(p[key] || 0)}` })));
    if (p.floor_s) bars.append(el("i", { class: "mark", style: `left:${share(Math.min(p.floor_s, longest))}` }));
    const left = known(p.final_s) && known(p.floor_s) ? Math.max(0, p.final_s - p.floor_s) : null;
    const cells = [p.eager_s, p.final_s, p.floor_s, left].map((s) => el("td", { class: "num" }, seconds(s)));
    $("parts").append(el("tr", {}, el("td", {}, p.name), el("td", {}, bars), ...cells, el("td", { class: "dim" }, p.basis), el("td", { class: "why" }, p.fix)));
  }
}
function regions() {
  if (!R.regions.length) { $("regions-panel").hidden = true; return; }
  const lanes = [["eager", "eager_s", "var(--other)"], ["torch.compile", "stock_s", "var(--latency)"], ["result", "final_s", "var(--good)"]].filter(([, key]) => R.regions.some((r) => known(r[key])));
  $("regions-legend").replaceChildren(...lanes.map(([name, , color]) => el("span", {}, el("i", { style: `background:${color}` }), name)));
  const longest = Math.max(...R.regions.flatMap((r) => lanes.map(([, key]) => r[key] || 0)), 1e-12);
  for (const r of R.regions) {
    const bars = el("div", {}, ...lanes.map(([, key, color]) => el("div", { class: "lane", style: `background:${color};width:${(100 * (r[key] || 0) / longest).toFixed(2)}%` })));
    const kernel = { eager_s: r.eager_kernel, stock_s: r.stock_kernel, final_s: r.final_kernel };
    const facts = el("div", { class: "dim" }, ...lanes.map(([name, key]) => el("div", {}, `${name} ${seconds(r[key] || 0)}${kernel[key] ? ` · ${kernel[key]}` : ""}`)));
    $("regions").append(el("div", { class: "pair" }, el("div", {}, r.name, el("div", { class: "dim" }, `${r.num_eager} → ${r.num_final} kernels`)), bars, facts));
  }
}
function rewrites() {
  const winner = R.entries.find((e) => e.name === R.winner);
  const names = winner ? Object.keys(winner.rewrites) : [];
  if (!names.length) { $("rewrites-panel").hidden = true; return; }
  $("rewrites").append(el("tr", {}, ...["rewrite", "times", "where"].map((name) => el("th", {}, name))));
  for (const name of names) {
    const places = winner.places[name] || [];
    const shown = places.slice(0, 6).join(", ") + (places.length > 6 ? ` and ${places.length - 6} more` : "");
    $("rewrites").append(el("tr", {}, el("td", {}, name), el("td", { class: "num" }, winner.rewrites[name]), el("td", { class: "why" }, shown)));
  }
}
function list(id, lines = R[id]) {
  if (!lines.length) { $(`${id}-panel`).hidden = true; return; }
  $(id).replaceChildren(...lines.map((line) => el("li", {}, line)));
}
function footer() {
  $("footer").textContent = Object.entries(R.environment).filter(([, v]) => known(v)).map(([k, v]) => `${k} ${Array.isArray(v) ? v.join(".") : v}`).join(" · ");
}
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
heading(); cards(); way(); proof(); tried(); narrowed(); parts(); regions(); rewrites(); list("explanations"); list("remaining"); list("stages", (R.stages_left_out || []).map(([name, reason]) => `${name}: ${reason}`)); list("notes"); footer();

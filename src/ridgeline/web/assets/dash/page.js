// Small tools of every page. All text goes through textContent, so a name from the store is never markup.
export const $ = (id) => document.getElementById(id);
export function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) {
    if (v === null || v === undefined || v === false) continue;
    if (k === "text") node.textContent = v; else if (k.startsWith("on")) node.addEventListener(k.slice(2), v); else node.setAttribute(k, v === true ? "" : v);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
export async function ask(path, words) {
  const query = words ? `?${new URLSearchParams(words)}` : "", answer = await fetch(`${path}${query}`);
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || `the dashboard answered ${answer.status}`);
  return found;
}
/* Binary columns: four bytes of length, a header as JSON, then each column from a multiple of eight bytes on. */
export async function askColumns(path, words) {
  const answer = await fetch(`${path}?${new URLSearchParams(words)}`);
  if (!answer.ok) throw new Error((await answer.json()).error);
  const body = await answer.arrayBuffer(), length = new DataView(body).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, length))), columns = new Map();
  let at = 4 + length;
  for (const { name, type, words: spoken } of head.columns) {
    const kind = { f4: Float32Array, i4: Int32Array, u1: Uint8Array }[type], values = new kind(body, at, head.rows);
    columns.set(name, { values, words: spoken });
    at += Math.ceil(values.byteLength / 8) * 8;
  }
  return { ...head, columns };
}
const digits = (v) => Math.abs(v) >= 999.5 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(4)));
function scaled(value, steps) {
  if (value === 0) return `0 ${steps[steps.length - 1][1]}`;
  const [scale, unit] = steps.find(([size]) => Math.abs(value) >= size * 0.9995) || steps[steps.length - 1];
  return `${digits(value / scale)} ${unit}`;
}
export const seconds = (v) => scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
export const bytes = (v) => scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
export const joules = (v) => scaled(v, [[1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"], [1e-6, "µJ"]]);
export function shown(name, v) {
  if (v === null || v === undefined || (typeof v === "number" && !Number.isFinite(v))) return "–";
  if (typeof v !== "number") return String(v);
  const plain = name.replace(/\.(low|high|mean|p\d+)$/, "");
  if (/_s$/.test(plain) && !/per_s$/.test(plain)) return seconds(v);
  if (/_bytes$/.test(plain)) return bytes(v);
  if (/_j$/.test(plain)) return joules(v);
  if (/_frac$/.test(plain)) return `${digits(100 * v)} %`;
  return Math.abs(v) >= 1e9 ? scaled(v, [[1e15, "P"], [1e12, "T"], [1e9, "G"]]) : Math.abs(v) > 0 && Math.abs(v) < 1e-3 ? v.toExponential(3) : digits(v);
}
export const when = (text) => text.slice(0, 16).replace("T", " ");
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- state in the address: #/page/words?key=value ---------------------------------------------------------------
export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query || "")) };
}
export function link(path, query) {
  const words = new URLSearchParams(Object.entries(query || {}).filter(([, v]) => v !== "" && v !== null && v !== undefined));
  return `${location.pathname === "/" ? "" : "/"}#/${path.map(encodeURIComponent).join("/")}${[...words].length ? `?${words}` : ""}`;
}
export const keep = (path, query) => history.replaceState(null, "", link(path, query));

export function panel(title, ...children) {
  return el("section", { class: "panel" }, title ? el("h2", {}, ...[title].flat()) : null, ...children);
}
/* A table; heads are [text, is a number, sort handler, direction]. */
export function table(heads, rows, attrs) {
  const cells = heads.map(([text, num, sort, direction]) => el("th", { class: num ? "num" : null, scope: "col", "aria-sort": direction || null },
    sort ? el("button", { type: "button", onclick: sort, text: text + (direction ? (direction === "ascending" ? " ↑" : " ↓") : "") }) : document.createTextNode(text)));
  const body = rows.map((row) => row instanceof Node ? row : el("tr", {}, ...row.map((cell, at) => el("td", { class: heads[at] && heads[at][1] ? "num" : null }, cell instanceof Node ? cell : document.createTextNode(cell === null || cell === undefined ? "–" : String(cell))))));
  return el("div", { class: "scroll" }, el("table", { class: "list", ...attrs }, el("thead", {}, el("tr", {}, ...cells)), el("tbody", {}, ...body)));
}
let fading = null;
export function say(text) {
  clearTimeout(fading);
  $("status").textContent = text;
  fading = setTimeout(() => { $("status").textContent = ""; }, 4000);
}
export function failed(error) { return panel("This cannot be shown", el("p", { class: "error", text: error.message })); }

// ---- files --------------------------------------------------------------------------------------------------------
export function save(name, blob) {
  const url = URL.createObjectURL(blob), anchor = el("a", { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
/* Text that a spreadsheet would compute gets a quote before it. */
const cell = (v) => {
  const text = typeof v === "string" && /^[=+\-@\t\r\n]/.test(v) ? `'${v}` : v === null || v === undefined ? "" : String(v);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
export const csv = (heads, rows) => [heads, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
export const saveCsv = (name, heads, rows) => save(name, new Blob([csv(heads, rows)], { type: "text/csv" }));

// What-if: every answer is a prediction that the server makes with the model itself.
import { ask, bytes, el, joules, panel, say, seconds, table } from "./page.js";

const SIZES = [["mode", ["infer", "prefill", "decode", "train"]], ["precision", ["bf16", "fp16", "fp32", "tf32", "fp8"]], ["batch"], ["seq"], ["kv"], ["image"]];

export async function whatIfPage(page) {
  const given = Object.fromEntries(new URLSearchParams(location.search)), choices = await ask("/api/what-if/choices");
  const state = { model: "llama3-8b", on: "h200", execution: "eager", ...given };
  const outcome = el("div", { id: "outcome" }), sliders = el("div", { id: "sliders" }), ops = el("div", {}), command = el("code", {}), error = el("p", { class: "error", role: "alert" }), parts = new Map();
  let asked = 0, timer = null;
  const words = () => Object.fromEntries(Object.entries(state).filter(([k, v]) => v !== "" && !(k.startsWith("x.") && Number(v) === 1)));
  const set = (key) => (e) => { state[key] = e.target.value.trim(); run(); };
  const list = (id, all) => el("datalist", { id }, ...all.map((name) => el("option", { value: name })));
  const field = (key, input) => el("label", {}, key, input);
  const form = el("div", { class: "row" }, list("models", choices.models), list("devices", choices.devices),
    field("model", el("input", { type: "text", list: "models", value: state.model, onchange: set("model") })), field("on", el("input", { type: "text", list: "devices", value: state.on, onchange: set("on") })),
    field("execution", el("select", { onchange: set("execution") }, ...choices.executions.map((name) => el("option", { value: name, text: name, selected: name === state.execution })))),
    ...SIZES.map(([key, all]) => field(key, all ? el("select", { onchange: set(key) }, el("option", { value: "", text: "as usual" }), ...all.map((name) => el("option", { value: name, text: name, selected: state[key] === name }))) : el("input", { type: "number", min: "1", size: "7", value: state[key] || "", placeholder: "as usual", onchange: set(key) }))));
  const reset = el("button", { type: "button", class: "small", text: "reset", onclick: () => { for (const key of Object.keys(state)) if (key.startsWith("x.")) delete state[key]; run(); } });
  page.append(panel("What if", form, el("p", { class: "dim" }, "The model predicts every position anew; the small curve beside a slider is the step time over 1/4× … 4× of that number, the others as they stand. ", command), error),
    panel(["Changes ", reset], el("div", { class: "what" }, sliders, outcome)), panel("By op", ops));

  function spark(curve, values, factor) {
    const known = values.filter((v) => v !== null), low = Math.min(...known), high = Math.max(...known), node = (tag, attrs) => { const made = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [k, v] of Object.entries(attrs)) made.setAttribute(k, v); return made; };
    const X = (f) => 3 + 84 * (Math.log2(f) + 2) / 4, Y = (v) => 23 - 20 * (v - low) / ((high - low) || 1), root = node("svg", { viewBox: "0 0 90 26", "aria-hidden": "true" });
    root.append(node("path", { d: curve.map((f, i) => values[i] === null ? "" : `${i && values[i - 1] !== null ? "L" : "M"}${X(f).toFixed(1)} ${Y(values[i]).toFixed(1)}`).join("") }));
    const at = curve.reduce((best, f, i) => values[i] !== null && Math.abs(Math.log2(f / factor)) < Math.abs(Math.log2(curve[best] / factor)) ? i : best, 0);
    if (values[at] !== null) root.append(node("circle", { cx: X(factor), cy: Y(values[at]), r: 2.5 }));
    return root;
  }
  function draw(found) {
    for (const [name, label] of found.axes) {
      if (!parts.has(name)) {
        const input = el("input", { type: "range", min: "-2", max: "2", step: "0.05", id: `x-${name}` }), shownAs = el("output", {}), drawn = el("span", {});
        input.addEventListener("input", () => { const f = Number((2 ** Number(input.value)).toPrecision(3)); state[`x.${name}`] = String(f); shownAs.textContent = `${f}×`; run(); });
        parts.set(name, { input, shownAs, drawn, row: el("div", { class: "slider" }, el("label", { for: `x-${name}`, text: label }), input, shownAs, drawn) });
      }
      const part = parts.get(name), factor = Number(state[`x.${name}`] || 1);
      part.input.value = String(Math.log2(factor));
      part.input.setAttribute("aria-valuetext", `${factor} times`);
      part.shownAs.textContent = `${factor}×`;
      part.drawn.replaceChildren(spark(found.curve, found.curves[name], factor));
    }
    const now = found.axes.map(([name]) => parts.get(name).row);
    if (now.length !== sliders.children.length || now.some((row, at) => sliders.children[at] !== row)) sliders.replaceChildren(...now);
    const a = found.before, b = found.after, rows = [["wall time", "step_s", seconds], ["90 % interval, from", "low_s", seconds], ["to", "high_s", seconds], ["device busy", "busy_s", seconds], ["device idle", "idle_s", seconds], ["floor", "floor_s", seconds], ["energy a step", "energy_j", joules], ["average power", "power_w", (v) => `${v.toFixed(0)} W`], ["money a step", "usd", (v) => `$${v.toPrecision(3)}`], ["peak memory", "peak_bytes", bytes]];
    outcome.replaceChildren(table([[""], ["predicted", true], ["what if", true], ["", true]], rows.map(([text, key, show]) => {
      const ratio = a[key] > 0 ? b[key] / a[key] : 1, same = Math.abs(ratio - 1) < 0.0005;
      return [text, show(a[key]), show(b[key]), el("span", { class: same ? "dim" : ratio < 1 ? "better" : "worse", text: same ? "·" : `${ratio > 1 ? "+" : "−"}${Math.abs(100 * (ratio - 1)).toFixed(1)} %` })];
    })), el("p", { class: b.peak_bytes > b.capacity_bytes ? "error" : "dim", text: b.peak_bytes > b.capacity_bytes ? `does not fit: the device has ${bytes(b.capacity_bytes)}` : `basis: ${b.basis}` }));
    command.textContent = `ridgeline predict ${found.model} --on "${found.device}" --execution ${found.execution}${["mode", "precision", "batch", "seq", "kv", "image"].filter((k) => state[k]).map((k) => ` --${k} ${state[k]}`).join("")}`;
    ops.replaceChildren(table([["op"], ["predicted", true], ["what if", true], ["bound"]], found.ops.map(([op, was, is, b0, b1]) => [op, seconds(was), seconds(is), b0 === b1 ? b0 : `${b0} → ${b1}`])));
    page.dataset.step = String(b.step_s);
  }
  async function evaluate() {
    const mine = ++asked, began = performance.now();
    history.replaceState(null, "", `/what-if?${new URLSearchParams(words())}`);
    try {
      const found = await ask("/api/what-if", words());
      if (mine !== asked) return;
      error.textContent = "";
      draw(found);
      say(`predicted in ${seconds((performance.now() - began) / 1000)}`);
    } catch (problem) { if (mine === asked) error.textContent = problem.message; }
  }
  function run() { clearTimeout(timer); timer = setTimeout(evaluate, 60); }
  await evaluate();
  return () => clearTimeout(timer);
}

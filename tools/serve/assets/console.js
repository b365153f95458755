"use strict";
// The console of kvshm serve: shows what /events sends.  All text of engines goes through
// textContent, so that nothing in it is ever markup.

const WIDTH = 640, HOUR = 3600, MOST_POINTS = 120, MOST_FAULTS = 50, MOST_SILENCE = 8, LABELLED_EDGES = 12;
const NAMES = { local: "own cache", peer: "other engines", computed: "computed" };
const $ = (id) => document.getElementById(id);

// -- texts of numbers, as kvshm top writes them

function scaled(value, units, least = 1000) {
  let unit = 0;
  while (value >= least - 0.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  const digits = unit && value < 9.95 ? 1 : 0;
  return `${value.toFixed(digits)}${units[unit]}`;
}
const known = (text) => (value) => (value === null || value === undefined ? "–" : text(value));
const number = known((value) => scaled(value, ["", "k", "M", "G", "T"]));
const bytes = known((value) => scaled(value, [" B", " kB", " MB", " GB", " TB"]));
const rate = known((value) => `${bytes(value)}/s`);
const percent = known((share) => `${(share * 100).toFixed(1)} %`);
const time = known((ns) => ns >= 1e9 ? `${(ns / 1e9).toFixed(1)} s` : ns >= 1e6 ? `${(ns / 1e6).toFixed(1)} ms` : `${(ns / 1e3).toFixed(0)} µs`);
const age = (s) => s === null ? "now" : s < 60 ? `${s.toFixed(0)} s ago` : s < 3600 ? `${(s / 60).toFixed(0)} min ago` : `${(s / 3600).toFixed(0)} h ago`;
const share = (tokens, part) => {
  const all = tokens.local + tokens.peer + tokens.computed;
  return all ? part / all : null;
};

// -- the page's elements: changed where they differ, never only added

function set(element, text, classes = "") {
  if (element.textContent !== text) element.textContent = text;
  if (element.getAttribute("class") !== classes) element.setAttribute("class", classes);
  return element;
}

function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child])), times = new Map();
  items.forEach((item, position) => {
    const same = keyOf(item), time = times.get(same) ?? 0, key = time ? `${same}\n${time}` : same;
    times.set(same, time + 1);
    let child = old.get(key);
    if (child === undefined) { child = make(); child.dataset.key = key; }
    old.delete(key);
    update(child, item);
    if (parent.children[position] !== child) parent.insertBefore(child, parent.children[position] ?? null);
  });
  for (const child of old.values()) child.remove();
}

// A row's first cell is its head; a cell is a text, or a text and its classes.
function table(id, items, keyOf, cellsOf) {
  keyed($(id).tBodies[0], items, keyOf, () => document.createElement("tr"), (row, item) => {
    cellsOf(item).forEach((cell, column) => {
      const [text, classes] = Array.isArray(cell) ? cell : [cell, ""];
      if (row.children[column] === undefined) {
        const made = row.appendChild(document.createElement(column ? "td" : "th"));
        if (!column) made.scope = "row";
      }
      set(row.children[column], text, classes);
    });
  });
}

function list(parent, items, textOf) {
  keyed(parent, items, (item) => textOf(item).join("\n"), () => document.createElement("li"), (line, item) => {
    const [text, remedy, classes] = textOf(item);
    if (line.firstChild) return; // its key is all that it says
    line.append(text);
    line.className = classes ?? "";
    if (remedy) set(line.appendChild(document.createElement("span")), `remedy: ${remedy}`, "remedy");
  });
}

function drawn(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// -- what a look has found

let status = null, view = null, points = [], several = false;
const named = (space, engine) => (several ? `${space}/${engine}` : engine);

function show() {
  several = view.namespaces.length > 1;
  const word = view.namespaces.length ? status.state : "nothing of kvshm runs";
  set($("state"), word, `badge ${status.state}`);
  document.title = `kvshm: ${word}`;
  showNumbers();
  showFaults();
  showEngines();
  showCopies();
  showChanges();
  offerModels();
}

function showNumbers() {
  const node = view.node, tokens = node.tokens;
  const copies = Object.entries(node.bytes_per_second).map(([path, speed]) => `${path} ${rate(speed)}`);
  const rows = [
    ["Engines", view.namespaces.map((space) => `${several ? `${space.namespace} ` : ""}${space.live}/${space.engines}`).join(", ") || "0"],
    ["Coordinator", view.namespaces.map((space) => space.coordinator === "healthy" ? "healthy" : space.coordinator_reason).join(", ") || "none"],
    ["Prompt tokens", known((n) => `${number(n)}/s`)(node.prompt_tokens_per_second)],
    ["Own hits", percent(share(tokens, tokens.local))],
    ["From peers", percent(share(tokens, tokens.peer))],
    ["Not prefilled", known((n) => `${number(n)} tok/s`)(node.not_prefilled_per_second)],
    ["Copies", copies.join(", ") || "none"],
    ["Published blocks", `${number(node.published_blocks)}, ${number(node.distinct_blocks)} distinct`],
    ["Discarded imports", number(node.discarded_since_start)],
    ["Indexes are late by", known((s) => (s ? time(s * 1e9) : "0"))(node.worst_lag_seconds)],
  ];
  keyed($("numbers"), rows, ([name]) => name, () => {
    const pair = document.createElement("div");
    pair.append(document.createElement("dt"), document.createElement("dd"));
    return pair;
  }, (pair, [name, text]) => { set(pair.firstChild, name); set(pair.lastChild, text); });
}

function showFaults() {
  const shown = view.faults.slice(0, MOST_FAULTS).map((fault) => {
    const who = fault.engines.length ? `${fault.engines.join(", ")}: ` : "";
    const times = fault.kind === "log" && fault.times > 1 ? ` (${fault.times} times)` : "";
    const isNow = fault.age_seconds === null;
    return [`${age(isNow ? null : Math.floor(fault.age_seconds / 10) * 10)}: ${who}${fault.text}${times}`, "", isNow ? "degraded" : ""];
  });
  const more = view.faults.length - shown.length;
  if (more > 0) shown.push([`and ${more} more`, "", "quiet"]);
  list($("faults"), shown.length ? shown : [["nothing", "", "quiet"]], (line) => line);
}

function showEngines() {
  table("engines", view.engines, (engine) => `${engine.namespace} ${engine.epoch}`, (engine) => {
    const mark = engine.keeps ? ", keeper" : engine.in_drain ? ", in drain" : "";
    const why = engine.reasons.length ? `: ${engine.reasons[0]}` : "";
    return [
      named(engine.namespace, engine.engine),
      [`${engine.state}${mark}${why}`, `text long ${engine.state}`],
      number(engine.published_blocks), number(engine.duplicate_blocks), number(engine.last_copy_blocks),
      percent(share(engine.tokens, engine.tokens.local)), percent(share(engine.tokens, engine.tokens.peer)),
      rate(engine.in_bytes_per_second), rate(engine.out_bytes_per_second),
      number(engine.leased_blocks), number(engine.lacking_blocks), time(engine.hook_mean_ns),
      [engine.model, "text long"],
    ];
  });
}

function showCopies() {
  const pairs = view.copies.filter((pair) => pair.importer_epoch !== pair.exporter_epoch);
  table("copies", pairs, (pair) => `${pair.importer_epoch} ${pair.exporter_epoch} ${pair.path}`, (pair) => [
    named(pair.namespace, pair.importer), [named(pair.namespace, pair.exporter), "text"],
    [pair.slow ? `${pair.path}: ${pair.slow}` : pair.path, pair.slow ? "text slow" : "text"],
    rate(pair.bytes_per_second), bytes(pair.window_bytes), bytes(pair.total_bytes), number(pair.failed),
  ]);
  const now = pairs.filter((pair) => pair.bytes_per_second).sort((a, b) => b.bytes_per_second - a.bytes_per_second);
  const told = now.slice(0, 3).map((pair) => `${pair.importer} from ${pair.exporter} at ${rate(pair.bytes_per_second)} by ${pair.path}`);
  set($("graph-text"), pairs.length ? `${now.length} of ${pairs.length} pairs copy now${told.length ? `: ${told.join("; ")}` : ""}` : "no engine has copied from another yet", "quiet");
  draw(pairs.filter((pair) => pair.window_bytes || pair.bytes_per_second));
}

// -- the graph: engines on an ellipse, an arrow from whom is copied to who copies

let lastGraph = "";

function draw(pairs) {
  const engines = view.engines, place = new Map(), flat = engines.length < 3;
  const same = JSON.stringify([engines.map((e) => [e.epoch, e.engine, e.state]), pairs.map((p) => [p.importer_epoch, p.exporter_epoch, p.path, p.slow, rate(p.bytes_per_second)])]);
  if (same === lastGraph) return;
  lastGraph = same;
  engines.forEach((engine, i) => {
    const turn = 2 * Math.PI * i / engines.length - (engines.length === 2 ? Math.PI : Math.PI / 2);
    place.set(engine.epoch, { x: 320 + 190 * Math.cos(turn), y: 200 + 150 * Math.sin(turn), cos: Math.cos(turn), sin: Math.sin(turn) });
  });
  const shapes = [];
  const seen = pairs.filter((pair) => place.has(pair.importer_epoch) && place.has(pair.exporter_epoch));
  for (const pair of seen) shapes.push(...arrow(pair, place.get(pair.exporter_epoch), place.get(pair.importer_epoch), seen.length <= LABELLED_EDGES));
  for (const engine of engines) {
    const { x, y, cos, sin } = place.get(engine.epoch);
    const anchor = flat || Math.abs(cos) < 0.2 ? "middle" : cos > 0 ? "start" : "end";
    shapes.push(drawn("circle", { class: `engine ${engine.state}${engine.keeps ? " keeper" : ""}`, cx: x, cy: y, r: 8 }));
    shapes.push(drawn("text", { x: flat ? x : x + 14 * cos, y: flat ? y + 28 : y + 4 + 18 * sin, "text-anchor": anchor }, short(named(engine.namespace, engine.engine))));
  }
  $("graph").setAttribute("viewBox", flat ? "0 125 640 150" : "0 0 640 400");
  $("graph").setAttribute("class", flat ? "flat" : "");
  $("graph").replaceChildren(...shapes);
}

const short = (name) => (name.length > 20 ? `${name.slice(0, 19)}…` : name);

function arrow(pair, from, to, labelled) {
  // Bent aside from the middle, so that both directions of a pair are apart.
  const bend = { x: (from.x + to.x) / 2 + (to.y - from.y) * 0.16, y: (from.y + to.y) / 2 - (to.x - from.x) * 0.16 };
  const length = Math.hypot(to.x - bend.x, to.y - bend.y) || 1;
  const unit = { x: (to.x - bend.x) / length, y: (to.y - bend.y) / length };
  const tip = { x: to.x - 11 * unit.x, y: to.y - 11 * unit.y };
  const speed = pair.bytes_per_second ?? 0, kind = pair.slow ? " slow" : speed ? "" : " resting";
  const line = drawn("path", {
    class: `edge${kind}`, "stroke-width": Math.min(1.5 + Math.log10(1 + speed / 1e6), 7).toFixed(1),
    d: `M${from.x.toFixed(1)} ${from.y.toFixed(1)}Q${bend.x.toFixed(1)} ${bend.y.toFixed(1)} ${tip.x.toFixed(1)} ${tip.y.toFixed(1)}`,
  });
  line.append(drawn("title", {}, `${pair.importer} from ${pair.exporter}: ${rate(speed)} by ${pair.path}`));
  const corner = (side) => `${(tip.x - 9 * unit.x + side * 5 * unit.y).toFixed(1)},${(tip.y - 9 * unit.y - side * 5 * unit.x).toFixed(1)}`;
  const head = drawn("polygon", { class: `arrow${kind}`, points: `${tip.x.toFixed(1)},${tip.y.toFixed(1)} ${corner(1)} ${corner(-1)}` });
  const middle = { x: (from.x + 2 * bend.x + to.x) / 4, y: (from.y + 2 * bend.y + to.y) / 4 };
  const label = drawn("text", { x: middle.x, y: middle.y - 4, "text-anchor": "middle", class: "quiet" }, `${pair.path} ${rate(speed)}`);
  return labelled && speed ? [line, head, label] : [line, head];
}

function showHour() {
  if (!points.length) return;
  const shapes = [], peak = Math.max(...points.map((p) => (p.local + p.peer + p.computed) / p.seconds), 1);
  let right = WIDTH;
  for (const point of [...points].reverse()) {
    const width = point.seconds / HOUR * WIDTH;
    let top = 150;
    for (const source of ["local", "peer", "computed"]) {
      const height = point[source] / point.seconds / peak * 140;
      top -= height;
      if (height) shapes.push(drawn("rect", { class: source, x: (right - width).toFixed(1), y: top.toFixed(1), width: Math.max(width - 0.5, 0.5).toFixed(1), height: height.toFixed(1) }));
    }
    right -= width;
  }
  $("hour").replaceChildren(...shapes);
  const sums = { local: 0, peer: 0, computed: 0 };
  for (const point of points) for (const source of Object.keys(sums)) sums[source] += point[source];
  const all = sums.local + sums.peer + sums.computed;
  const parts = Object.entries(NAMES).map(([source, name]) => `${name} ${percent(share(sums, sums[source]))}`);
  set($("hour-text"), all ? `of ${number(all)} prompt tokens: ${parts.join(", ")}; at full height ${number(peak)} a second` : "no prompt tokens", "quiet");
  table("points", [...points].reverse(), (point) => String(point.time), (point) => [
    new Date(point.time * 1000).toLocaleTimeString(), number(point.local), number(point.peer),
    number(point.computed), bytes(point.copied_bytes), number(point.discarded),
  ]);
}

function showChanges() {
  const rows = [];
  const judged = new Map(status.namespaces.flatMap((space) => space.engines.map((engine) => [engine.epoch, engine])));
  for (const engine of view.engines) {
    const health = judged.get(engine.epoch), name = named(engine.namespace, engine.engine);
    if (health && health.live && !health.ready) rows.push([name, "joins", health.reasons[0] ?? ""]);
    else if (engine.lacking_blocks && engine.lag_seconds > 1) rows.push([name, "reads", `its index lacks ${number(engine.lacking_blocks)} blocks of its peers`]);
    if (engine.in_drain) rows.push([name, "drains", `${number(engine.last_copy_blocks)} last copies and ${number(engine.leased_blocks)} leased blocks are left`]);
  }
  table("changes", rows, ([name, what]) => `${name} ${what}`, ([name, what, progress]) => [name, [what, "text"], [progress, "text long"]]);
  $("changes").hidden = !rows.length;
  $("no-changes").hidden = rows.length > 0;
}

function offerModels() {
  const engines = status.namespaces.flatMap((space) => space.engines).filter((engine) => !engine.keeps);
  const values = [...new Set(engines.map((engine) => JSON.stringify([engine.model, engine.block_size])))].sort();
  keyed($("prefix-model"), values, (value) => value, () => document.createElement("option"), (option, value) => {
    const [model, size] = JSON.parse(value);
    if (option.value !== value) option.value = value;
    set(option, `${model}, blocks of ${size} tokens`);
  });
}

// Numbers as in KV events, of up to 20 digits, are sent in hexadecimal: JavaScript would round them.
const hashOf = (word) => (/^\d{1,20}$/.test(word) ? BigInt(word).toString(16).padStart(16, "0") : word);

async function fetched(path, options) {
  const reply = await fetch(path, options);
  if (!reply.ok) throw new Error((await reply.text()).trim());
  return reply.json();
}

async function ask(submitted) {
  submitted.preventDefault();
  const [model, block_size] = JSON.parse($("prefix-model").value);
  const answer = $("prefix-answer"), words = $("prefix-hashes").value.split(/[\s,;"'[\]]+/).filter(Boolean);
  try {
    const short = words.filter((word) => /^[\da-f]{16}$/i.test(word)), seq_hashes = words.map(hashOf);
    if (short.length && (short.length === words.length || /[a-f]/i.test(short))) throw new Error(`${short[0]}: 16 digits may be the beginning of a hash; kvshm dump --json prints whole ones. Before a number of 16 digits, write 0`);
    const reply = await fetched("/prefix", { method: "POST", body: JSON.stringify({ model, block_size, seq_hashes }) });
    const found = Object.entries(reply.default).sort(([, a], [, b]) => b.longest_matched - a.longest_matched);
    const lines = found.map(([engine, held]) => `${engine}: ${held.GPU} tokens in its own cache${held.CPU ? `, ${held.CPU} with keepers` : ""}`);
    const head = `of ${seq_hashes.length * block_size} tokens`;
    answer.replaceChildren(set(document.createElement("p"), head), document.createElement("ul"));
    list(answer.lastChild, lines, (line) => [line]);
  } catch (error) {
    answer.replaceChildren(set(document.createElement("p"), error.message, "down"));
  }
}

async function check() {
  const button = $("doctor-run");
  button.disabled = true;
  set($("doctor-text"), "looking", "quiet");
  try {
    const found = await fetched("/doctor");
    const isBad = (each) => ["problem", "warning"].includes(each.result);
    const lineOf = (each) => [`${each.check}: ${each.found}`, each.remedy, { problem: "down", warning: "degraded" }[each.result]];
    list($("doctor"), found.checks.filter(isBad), lineOf);
    list($("doctor-well").lastElementChild, found.checks.filter((each) => !isBad(each)), lineOf);
    $("doctor-well").hidden = false;
    set($("doctor-text"), `${found.problems} problems, ${found.warnings} warnings, at ${new Date().toLocaleTimeString()}`, "quiet");
  } catch (error) {
    set($("doctor-text"), error.message, "down");
  }
  button.disabled = false;
}

// -- the stream, which costs the node nothing while the page is not seen

let stream = null, silence = 0;

function lose(why) {
  set($("connection"), why, "down");
  set($("state"), "unknown", "badge down");
  document.title = "kvshm: unknown";
}

function connect() {
  stream?.close();
  stream = new EventSource("/events");
  stream.onopen = () => { points = []; };
  stream.onerror = () => {
    lose("no answer from kvshm serve; trying again");
    if (stream?.readyState === EventSource.CLOSED) setTimeout(() => document.hidden || connect(), 3000);
  };
  stream.addEventListener("status", (event) => { status = JSON.parse(event.data); silence = 0; });
  stream.addEventListener("top", (event) => { view = JSON.parse(event.data); set($("connection"), "live"); show(); });
  stream.addEventListener("hour", (event) => { points = [...points, ...JSON.parse(event.data)].slice(-MOST_POINTS); showHour(); });
  stream.addEventListener("failed", (event) => { lose(JSON.parse(event.data)); silence = 0; });
}

setInterval(() => {
  silence += 1;
  if (stream && silence > MOST_SILENCE) lose(`nothing heard from kvshm serve for ${silence} s`);
}, 1000);

document.addEventListener("visibilitychange", () => {
  silence = 0;
  if (!document.hidden) connect();
  else { stream?.close(); stream = null; set($("connection"), "resting"); }
});
$("prefix").addEventListener("submit", ask);
$("doctor-run").addEventListener("click", check);
connect();
check();

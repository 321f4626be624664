"use strict";
// Asks the plane for everything every two seconds and writes it into the tables. What comes from the plane
// is only ever put in as text, so a name can never become markup.

const PERIOD = 2000, PATIENCE = 8000;
const byId = id => document.getElementById(id);
const STATES = {
  ready: "good", connected: "good", bad: "bad", failed: "bad", lost: "bad", unknown: "bad", unreachable: "wait",
  warn: "wait", starting: "wait", fetching: "wait", draining: "wait", stopping: "wait", expected: "wait", cordoned: "wait",
};

function span(seconds) {
  if (seconds == null) return "";
  const s = Math.max(0, seconds);
  if (s < 10) return s.toFixed(1) + " s";
  if (s < 100) return Math.round(s) + " s";
  if (s < 6000) return Math.round(s / 60) + " min";
  if (s < 172800) return Math.round(s / 3600) + " h";
  return Math.round(s / 86400) + " d";
}

function bytes(count) {
  if (count == null) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; count >= 1024 && at < units.length - 1; at++) count /= 1024;
  return (at && count < 100 ? count.toFixed(1) : Math.round(count)) + " " + units[at];
}

const percent = value => value == null ? "" : Math.round(value) + " %";
const clock = seconds => new Date(seconds * 1000).toLocaleTimeString();
const mark = (word, kind) => ({ mark: word, kind: kind ?? STATES[word] ?? "" });

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text != null) made.textContent = text;
  return made;
}

// A cell is text, or {n: number-like text}, or a list of marks and texts. It is rewritten only when it
// changed, so that a selection or a screen reader is not disturbed every two seconds.
function fill(cell, value) {
  const seen = JSON.stringify(value);
  if (cell.dataset.seen === seen) return;
  cell.dataset.seen = seen;
  cell.replaceChildren();
  for (const part of Array.isArray(value) ? value : [value]) {
    if (part == null || part === "") continue;
    if (part.mark != null) cell.append(element("span", "mark " + part.kind, part.mark), " ");
    else if (part.n != null) { cell.classList.add("n"); cell.append(String(part.n)); }
    else cell.append(String(part));
  }
}

function table(id, items, key, cells, nothing) {
  const body = byId(id), rows = new Map();
  for (const row of body.rows) if (row.dataset.key != null) rows.set(row.dataset.key, row);
  const wanted = items.map(item => {
    const name = key(item), row = rows.get(name) ?? element("tr");
    row.dataset.key = name;
    cells(item).forEach((value, at) => {
      fill(row.cells[at] ?? row.appendChild(element(at ? "td" : "th")), value);
      if (!at) row.cells[0].scope = "row";
    });
    return row;
  });
  if (!wanted.length) {
    const cell = element("td", "none", nothing);
    cell.colSpan = 20;
    const row = element("tr");
    row.append(cell);
    wanted.push(row);
  }
  wanted.forEach((row, at) => { if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null); });
  while (body.rows.length > wanted.length) body.deleteRow(-1);
}

function sums(rows) {
  const list = byId("sums");
  rows.forEach(([name, value, note], at) => {
    const box = list.children[at] ?? list.appendChild(element("div"));
    if (!box.children.length) box.append(element("dt"), element("dd"));
    const [term, number] = box.children, seen = [name, value, note].join("\n");
    if (box.dataset.seen === seen) return;
    box.dataset.seen = seen;
    term.textContent = name;
    number.replaceChildren(String(value), element("small", "", note));
  });
}

const counted = counts => Object.entries(counts).map(([word, count]) => `${count} ${word}`).join(", ");
const total = counts => Object.values(counts).reduce((sum, count) => sum + count, 0);
const problemMarks = counts => Object.entries(counts).map(([grade, count]) => mark(`${count} ${grade}`, STATES[grade]));

function show(all) {
  const now = all.status;
  byId("plane").textContent = now.plane;
  document.title = `${now.plane} · llmgw`;
  const waiting = byId("waiting");
  waiting.hidden = !now.waiting;
  waiting.textContent = now.waiting ? `Nothing is decided now: ${now.waiting} (${span(now.waiting_for)} left)` : "";
  sums([
    ["Nodes ready", `${now.nodes.ready ?? 0} of ${total(now.nodes)}`, counted(now.nodes) || "none has joined"],
    ["Replicas ready", `${now.replicas.ready ?? 0} of ${now.replicas_wanted}`, counted(now.replicas) || "none placed"],
    ["Models complete", `${now.models_complete} of ${now.models}`, ""],
    ["GPUs", now.gpus, ""],
    ["Problems", total(now.problems), counted(now.problems) || "none open"],
    ["Plane up", span(now.uptime), "version " + now.version],
  ]);
  byId("problems-section").hidden = !all.problems.length;
  table("problems", all.problems, p => [p.node, p.subject, p.code].join(" "), p => [
    [mark(p.grade), p.acknowledged_for != null ? mark("acknowledged") : ""], p.node, p.subject, { n: span(p.age) },
    [p.text, p.remedy].filter(Boolean).join(" — "),
  ], "");
  table("nodes", all.nodes, n => n.id, n => [
    n.id,
    [mark(n.stage), n.connected ? "" : mark("no stream", "wait"), n.draining ? mark("draining") : n.cordoned ? mark("cordoned") : ""],
    { n: n.heard_age == null ? "never" : span(n.heard_age) + " ago" },
    n.address,
    n.engines.map(e => [e.engine, e.version, e.state && e.state !== "installed" ? `(${e.state})` : ""].filter(Boolean).join(" ")).join(", "),
    { n: `${n.shards_ready}/${n.shards}` },
    { n: n.cpu_percent == null ? "" : `${percent(n.cpu_percent)} of ${n.cpu_threads}` },
    { n: n.memory_bytes == null || n.memory_available_bytes == null ? "" : `${bytes(n.memory_bytes - n.memory_available_bytes)} of ${bytes(n.memory_bytes)}` },
    { n: n.gpus ? `${n.gpus} (${bytes(n.gpu_memory_used_bytes) || "?"} of ${bytes(n.gpu_memory_bytes) || "?"})` : "–" },
    { n: n.ports ? `${n.ports_active}/${n.ports}` : "–" },
    problemMarks(n.problems),
    n.version,
  ], "No node has joined: llmgw ctl token create, then llmgw-node join on the machine.");
  table("models", all.models, m => m.name, m => [
    m.name, m.engine, { n: m.ready }, { n: m.placed }, { n: m.wanted },
    [m.ready >= m.wanted && m.wanted ? mark("complete", "good") : "", [m.reason, m.smallest_change].filter(Boolean).join(" — ")],
  ], "No model is wanted: llmgw ctl apply -f models.toml");
  table("replicas", all.replicas, r => r.id, r => {
    const load = name => r.shards.some(s => s[name] != null) ? r.shards.reduce((sum, s) => sum + (s[name] ?? 0), 0) : null;
    const progress = r.shards.map(s => s.progress).find(Boolean);
    return [
      r.id,
      [mark(r.state), progress ? `${progress.what} ${bytes(progress.done)}${progress.total ? " of " + bytes(progress.total) : ""}` : ""],
      r.nodes.join(", "), { n: r.port ?? "" }, { n: span(r.age) }, { n: r.restarts },
      { n: percent(load("cpu_percent")) }, { n: bytes(load("rss_bytes")) }, { n: r.in_flight ?? "" }, r.cause,
    ];
  }, "No replica is placed.");
  table("events", [...all.events].reverse(), e => String(e.id), e => [{ n: clock(e.clock) }, e.kind, e.text], "Nothing has happened yet.");
}

let lastAnswer = null, since = null, wake = () => {};
document.addEventListener("visibilitychange", () => wake());

function say(state, words) {
  const live = byId("live");
  live.dataset.state = state;
  if (live.textContent !== words) live.textContent = words;
  document.body.classList.toggle("stale", state === "gone");
}

async function ask() {
  const answer = await fetch("/api/v1/overview", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (answer.status === 401) { location.assign("/login"); throw new Error("signed out"); }
  if (!answer.ok) throw new Error(`it answers ${answer.status}`);
  return answer.json();
}

async function watch() {
  for (;;) {
    if (!document.hidden) {
      try {
        const all = await ask();
        lastAnswer = new Date();
        since = null;
        show(all);
        say("live", "live");
      } catch (error) {
        since ??= new Date();
        const why = error.name === "TimeoutError" ? "no answer in time" : error.name === "TypeError" ? "no connection" : error.message;
        say("gone", `plane not answering since ${since.toLocaleTimeString()} (${why})` +
          (lastAnswer ? `; what you see is of ${lastAnswer.toLocaleTimeString()}` : ""));
      }
    }
    await new Promise(awake => { wake = awake; setTimeout(awake, PERIOD); });
  }
}

watch();

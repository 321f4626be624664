"use strict";
// What the pages share: how numbers and states are written, tables that change without flickering, and asking the plane
// again and again. What comes from the plane is only ever put in as text, so a name can never become markup.

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
const linked = node => ({ href: "/nodes/" + encodeURIComponent(node), text: node });
const replicaLink = id => ({ href: "/replicas/" + encodeURIComponent(id), text: id });
const mark = (word, kind) => ({ mark: word, kind: kind ?? STATES[word] ?? "" });

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text != null) made.textContent = text;
  return made;
}

// A cell is text, {n: number-like text}, {href, text}, a mark, or a list of these. It is rewritten only when it
// changed, so that a selection or a screen reader is not disturbed every two seconds.
function fill(cell, value) {
  const seen = JSON.stringify(value);
  if (cell.dataset.seen === seen) return;
  cell.dataset.seen = seen;
  cell.replaceChildren();
  for (const part of Array.isArray(value) ? value : [value]) {
    if (part == null || part === "") continue;
    if (part.mark != null) cell.append(element("span", "mark " + part.kind, part.mark), " ");
    else if (part.href != null) {
      const link = element("a", "", part.text);
      link.href = part.href;
      cell.append(link);
    } else if (part.n != null) { cell.classList.add("n"); cell.append(String(part.n)); }
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

let lastAnswer = null, since = null, wake = () => {};
document.addEventListener("visibilitychange", () => wake());

function say(state, words) {
  const live = byId("live");
  live.dataset.state = state;
  if (live.textContent !== words) live.textContent = words;
  document.body.classList.toggle("stale", state === "gone");
}

class NotThere extends Error {}

async function ask(path) {
  const answer = await fetch("/api/v1/" + path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (answer.status === 401) { location.assign("/login"); throw new Error("signed out"); }
  if (answer.status === 404) throw new NotThere((await answer.json()).error.message);
  if (!answer.ok) throw new Error(`it answers ${answer.status}`);
  return answer.json();
}

const rest = () => new Promise(awake => { wake = awake; setTimeout(awake, PERIOD); });

async function watch(path, show) {
  for (;;) {
    if (!document.hidden) {
      try {
        const all = await ask(path);
        lastAnswer = new Date();
        since = null;
        show(all);
        say("live", "live");
      } catch (error) {
        if (error instanceof NotThere) { say("gone", error.message); await rest(); continue; }
        since ??= new Date();
        const why = error.name === "TimeoutError" ? "no answer in time" : error.name === "TypeError" ? "no connection" : error.message;
        say("gone", `plane not answering since ${since.toLocaleTimeString()} (${why})` +
          (lastAnswer ? `; what you see is of ${lastAnswer.toLocaleTimeString()}` : ""));
      }
    }
    await rest();
  }
}

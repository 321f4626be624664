"use strict";
// The fleet on one page. Tables, and how the plane is asked, are in table.js.

function show(all) {
  const now = all.status;
  byId("plane").textContent = now.plane;
  document.title = `${now.plane} · llmgw`;
  const waiting = byId("waiting");
  waiting.hidden = !now.waiting;
  waiting.textContent = now.waiting ? `${now.waiting} (${span(now.waiting_for)} left)` : "";
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
    [mark(p.grade), p.acknowledged_for != null ? mark("acknowledged") : ""], linked(p.node), p.subject, { n: span(p.age) },
    [p.text, p.remedy].filter(Boolean).join(" — "),
  ], "");
  table("nodes", all.nodes, n => n.id, n => [
    linked(n.id),
    [mark(n.stage), n.connected ? "" : mark("no stream", "wait"), n.drained ? mark("drained", "good") : n.draining ? mark("draining") : n.cordoned ? mark("cordoned") : ""],
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
    m.name, m.engine, { n: m.ready }, { n: m.placed }, { n: m.unloaded ? `${m.wanted} of ${m.replicas}` : m.wanted },
    [m.paused ? mark("paused", "bad") : "", [m.rollout, m.paused].filter(Boolean).join(" — ")],
    [m.ready >= m.wanted && m.wanted ? mark("complete", "good") : m.unloaded ? mark("unloaded") : "",
      [m.unloaded ? m.reason.replace(/^unloaded: /, "") : m.reason, m.smallest_change].filter(Boolean).join(" — ")],
  ], "No model is wanted: llmgw ctl apply -f models.toml");
  table("replicas", all.replicas, r => r.id, r => {
    const load = name => r.shards.some(s => s[name] != null) ? r.shards.reduce((sum, s) => sum + (s[name] ?? 0), 0) : null;
    const progress = r.shards.map(s => s.progress).find(Boolean);
    return [
      replicaLink(r.id),
      [mark(r.state), r.outdated ? mark("outdated", "wait") : "", r.warning ? mark(r.warning, "bad") : "",
        progress ? `${progress.what} ${bytes(progress.done)}${progress.total ? " of " + bytes(progress.total) : ""}` : "",
        !progress && r.waiting ? `waits for ${r.waiting}` : ""],
      r.nodes.flatMap((node, at) => at ? ["+", linked(node)] : [linked(node)]), { n: r.port ?? "" }, { n: span(r.age) }, { n: r.restarts },
      { n: percent(load("cpu_percent")) }, { n: bytes(load("rss_bytes")) }, { n: r.in_flight ?? "" }, r.cause,
    ];
  }, "No replica is placed.");
  table("events", [...all.events].reverse(), e => String(e.id), e => [{ n: clock(e.clock) }, e.kind, e.text], "Nothing has happened yet.");
}

watch("overview", show);

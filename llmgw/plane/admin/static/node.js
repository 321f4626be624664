"use strict";
// One node on one page: what is wrong, its GPUs and ports, what runs, what happened lately.

const NODE = byId("node").dataset.node;
const gbps = perSecond => perSecond == null ? "" : (perSecond * 8 / 1e9).toFixed(2) + " Gb/s";
const orNothing = (value, unit) => value == null ? "" : `${value}${unit}`;

function pcie(of) {
  const words = (gen, width) => gen || width ? `gen${gen ?? "?"} x${width ?? "?"}` : "";
  const now = words(of.pcie_gen, of.pcie_width), most = words(of.pcie_gen_max, of.pcie_width_max);
  return now === most || !most ? now : `${now || "?"} of ${most}`;
}

function nvlink(gpu) {
  const found = [];
  if (gpu.nvlinks) found.push(`${gpu.nvlinks_up ?? "?"}/${gpu.nvlinks}`);
  if (gpu.nvlink_domain) found.push(gpu.nvlink_domain);
  else if (gpu.nvlink_state && gpu.nvlink_state !== "not-supported") found.push(gpu.nvlink_state);
  return [found.join(" "), gpu.nvlink_healthy === false ? mark(gpu.nvlink_faults.join(", ") || "unhealthy", "bad") : ""];
}

function memoryErrors(gpu) {
  const found = [];
  if (gpu.ecc_uncorrected) found.push(mark(`${gpu.ecc_uncorrected} uncorrected`, "wait"));
  if (gpu.remap_failed) found.push(mark("remap failed", "bad"));
  else if (gpu.remap_pending) found.push(mark("remap pending", "bad"));
  if (gpu.remapped_rows) found.push(`${gpu.remapped_rows} rows remapped`);
  return found;
}

function clockWords(node) {
  if (node.node_clock == null) return "";
  const off = node.clock_offset;
  const how = off == null || Math.abs(off) < 1 ? "as the plane's" : `${span(Math.abs(off))} ${off > 0 ? "ahead of" : "behind"} the plane's`;
  return `${clock(node.node_clock)}, ${how}`;
}

function whose(process) {
  if (process.shard === "?") return "cannot be told: the driver counts processes in another PID namespace";
  return process.shard || mark("foreign", "wait");
}

function setting(value) {
  if (value == null) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return Array.isArray(value) ? value.join(", ") || "none" : String(value);
}

function host(node) {
  const limits = node.limits, imex = node.imex;
  const locked = limits.memlock_bytes;
  return [
    ["System", [node.os, node.kernel, node.arch].filter(Boolean).join(", ")],
    ["Processor", [node.node.cpu_threads && `${node.node.cpu_threads} threads`, node.cpu_model].filter(Boolean).join(", ")],
    ["Driver", [node.driver, node.cuda && `CUDA ${node.cuda}`, node.why_no_gpus].filter(Boolean).join(", ")],
    ["Expected", node.expected ? `${node.expected.text} (confirmed ${new Date(node.expected.clock * 1000).toLocaleDateString()})` : "as its peers have it"],
    ["Clock", clockWords(node)],
    ["IMEX", imex ? [imex.state, `${(imex.nodes ?? []).length} node${imex.nodes?.length === 1 ? "" : "s"}`, `${imex.channels ?? 0} channels`,
      imex.disconnected?.length ? `not connected to ${imex.disconnected.join(", ")}` : "",
      imex.mismatch?.length ? `differs from ${imex.mismatch.join(", ")}` : ""].filter(Boolean).join(", ") : ""],
    ["Subnet managers", node.managers.map(m => `${m.device}: ${m.master ? "master " + m.master.guid : m.error || "no master answers"}`).join("; ")],
    ["Memory that may be locked", locked === -1 ? "unlimited" : bytes(locked)],
    ["Huge pages", limits.hugepages_total == null ? "" : `${limits.hugepages_total} of ${bytes(limits.hugepage_bytes)}`],
    ["IOMMU", setting(limits.iommu)],
    ["ACS redirects at", limits.acs_redirect == null ? "" : `${limits.acs_redirect.length} bridges`],
    ["GPUDirect RDMA by", setting(limits.peer_memory)],
    ["Persistence daemon", setting(limits.persistence_daemon)],
    ["Fabric manager", setting(limits.fabric_manager)],
    ["Disks", node.disks.map(d => `${d.purpose}: ${bytes(d.free_bytes ?? 0)} of ${bytes(d.total_bytes ?? 0)} free on ${d.mount ?? d.path}`).join("; ")],
  ].filter(([, value]) => value);
}

function show(node) {
  const row = node.node, index = new Map(node.gpus.map(g => [g.uuid, g.index ?? g.uuid]));
  sums([
    ["Stage", row.stage, [row.connected ? "" : "no stream", row.drained ? "drained" : row.draining ? "draining" : row.cordoned ? "cordoned" : "",
      row.heard_age == null ? "never heard" : `heard ${span(row.heard_age)} ago`].filter(Boolean).join(", ")],
    ["Problems", total(row.problems), counted(row.problems) || "none open"],
    ["GPUs", row.gpus, row.gpus ? row.gpu_names.join(", ") : node.why_no_gpus],
    ["Ports up", row.ports ? `${row.ports_active} of ${row.ports}` : "–", ""],
    ["Shards ready", `${row.shards_ready} of ${row.shards}`, ""],
    ["Memory used", row.memory_bytes == null || row.memory_available_bytes == null ? "–" : bytes(row.memory_bytes - row.memory_available_bytes),
      row.memory_bytes == null ? "" : `of ${bytes(row.memory_bytes)}`],
  ]);
  table("problems", node.problems, p => [p.subject, p.code].join(" "), p => [
    [mark(p.grade), p.acknowledged_for != null ? mark(`acknowledged for ${span(p.acknowledged_for)}`) : ""],
    p.subject, p.code, { n: span(p.age) }, [p.text, p.remedy].filter(Boolean).join(" — "),
  ], "No problem is open.");
  table("gpus", node.gpus, g => g.uuid, g => [
    String(g.index ?? "?"),
    g.unreadable ? mark(g.unreadable, "bad") : g.name,
    { n: `${bytes(g.used_bytes) || "?"} of ${bytes(g.memory_bytes) || "?"}` },
    { n: g.reserved_bytes ? bytes(g.reserved_bytes) : "" }, { n: g.foreign_bytes ? bytes(g.foreign_bytes) : "" },
    { n: percent(g.utilization_percent) }, { n: orNothing(g.temperature_c, " °C") }, { n: g.power_w == null ? "" : `${Math.round(g.power_w)} W` },
    pcie(g), nvlink(g), memoryErrors(g), g.shards.join(", "), g.uuid,
  ], node.why_no_gpus ? `No GPUs: ${node.why_no_gpus}` : "No GPUs.");
  const processes = node.gpus.flatMap(g => g.processes.map(p => ({ ...p, gpu: g })));
  byId("processes-section").hidden = !processes.length;
  table("processes", processes, p => `${p.gpu.uuid} ${p.pid}`, p => [
    String(p.gpu.index ?? p.gpu.uuid), { n: p.pid }, p.name, { n: bytes(p.memory_bytes) || "hidden" }, whose(p),
  ], "");
  table("ports", node.ports, p => `${p.device}/${p.number}`, p => [
    `${p.device}/${p.number}`,
    [mark(p.state.toLowerCase(), p.state === "ACTIVE" ? "good" : "bad"), p.state === "ACTIVE" ? "" : p.physical_state],
    { n: orNothing(p.rate_gbps, " Gb/s") }, p.kind, p.role, { n: p.rail ?? "" }, p.fabric,
    { n: gbps(p.received_bytes_per_second) }, { n: gbps(p.sent_bytes_per_second) },
    p.netdev, { n: p.mtu ?? "" }, { n: p.lid ?? "" }, p.nearest_gpus.map(uuid => index.get(uuid) ?? uuid).join(", "), pcie(p), p.firmware,
  ], "No RDMA adapters.");
  const leaving = new Map(node.leaving.map(one => [one.shard, one.text]));
  table("shards", [...node.shards, ...node.strays], s => s.id, s => [
    s.id, [mark(s.state), s.warning ? mark(s.warning, "bad") : "",
      [s.want === "run" ? "" : `to ${s.want}`, leaving.get(s.id)].filter(Boolean).join("; ")],
    { n: span(s.state_age) }, { n: s.port ?? "" }, { n: s.pid ?? "" },
    { n: percent(s.cpu_percent) }, { n: bytes(s.rss_bytes) }, { n: s.restarts || "" }, s.last_failure?.cause ?? "",
  ], "No shard is placed here.");
  // What is empty or as usual is left out of an install.
  table("engines", node.engines, e => `${e.engine} ${e.version ?? ""}`, e => [
    e.engine, e.version ?? "", [mark(e.state ?? "installed", { installing: "wait", failed: "bad", unsupported: "" }[e.state] ?? "good")], e.detail ?? "",
  ], "No engine is installed here.");
  table("host", host(node), ([name]) => name, pair => pair, "Nothing is known.");
  table("history", [...node.history].reverse(), e => String(e.id), e => [{ n: new Date(e.clock * 1000).toLocaleString() }, e.kind, e.text], "Nothing has happened yet.");
}

watch("nodes/" + encodeURIComponent(NODE), show);

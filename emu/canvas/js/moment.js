// Everything that stands at one step, as plain data: key by key what Python's `Moment.state(times=False)` says.

import { countBelow, pairKey } from "./record.js";

/** A step that is known, as plain data. */
export function opAt(recording, row, table = recording.tables.steps) {
  return { rank: table.column("rank")[row], ...recording.op(table.column("op")[row]) };
}

/** Who took part, of those that run, and has not come. */
function absent(members, come) {
  const left = [...members];
  for (const rank of come) {
    const i = left.indexOf(rank);
    if (i >= 0) left.splice(i, 1);
  }
  return left;
}

/** Communications that wait for somebody at a step: row of `open` -> {come, waits_for, members}. */
function waiting(recording, index) {
  const { open } = recording.tables;
  const parts = recording.series("parts").until(index);
  const part_rank = recording.tables.parts.column("rank");
  const begin = open.column("begin");
  const end = open.column("end");
  const found = new Map();
  const runs = new Set(recording.ranks);
  for (let row = 0; row < open.n; row++) {
    if (begin[row] > index || (end[row] >= 0 && end[row] <= index)) continue;
    const rows = parts.groups.get(row) || [];
    const come = rows.slice(0, parts.count(rows, index)).map((i) => part_rank[i]);
    const members = recording.members[open.column("members")[row]] || [];
    const needed = open.column("transfer")[row] ? [open.column("src")[row], open.column("dst")[row]] : members;
    found.set(row, { come, members, waits_for: absent(needed.filter((rank) => runs.has(rank)), come) });
  }
  return found;
}

function messages(recording, open) {
  const table = recording.tables.open;
  const found = [];
  for (const row of open.keys()) {
    if (!table.column("transfer")[row]) continue;
    found.push({
      group: recording.text(table.column("group")[row]),
      src: table.column("src")[row],
      dst: table.column("dst")[row],
      bytes: table.column("bytes")[row],
      dtype: recording.text(table.column("dtype")[row]),
      posted: recording.text(table.column("posted")[row]),
      name: recording.text(table.column("name")[row]),
    });
  }
  return found;
}

function collectives(recording, open) {
  const table = recording.tables.open;
  const found = [];
  for (const [row, { come, members, waits_for }] of open) {
    if (table.column("transfer")[row]) continue;
    const what = recording.text(table.column("what")[row]);
    found.push({ what, members: [...members], bytes: table.column("bytes")[row], come, waits_for });
  }
  return found;
}

/** Communications that were started and not waited for: rank -> them. */
function works(recording, index, open) {
  const table = recording.tables.works;
  const rank = table.column("rank");
  const begin = table.column("begin");
  const end = table.column("end");
  const found = new Map();
  for (let row = 0; row < table.n; row++) {
    if (begin[row] > index || (end[row] >= 0 && end[row] <= index)) continue;
    if (!found.has(rank[row])) found.set(rank[row], []);
    const waits = open.get(table.column("open")[row]);
    found.get(rank[row]).push({
      work: table.column("work")[row],
      what: recording.text(table.column("what")[row]),
      name: recording.text(table.column("name")[row]),
      stream: recording.text(table.column("stream")[row]),
      bytes: table.column("bytes")[row],
      waits_for: waits ? [...waits.waits_for] : [],
    });
  }
  return found;
}

/** Streams that were given something: rank -> them, each rank's in the order of first use. */
function streams(recording, index) {
  const series = recording.series("streams").until(index);
  const table = recording.tables.streams;
  const found = new Map();
  for (const rows of series.groups.values()) {
    const row = series.within(rows, index);
    if (row < 0) continue;
    const rank = table.column("rank")[row];
    if (!found.has(rank)) found.set(rank, []);
    const name = recording.text(table.column("stream")[row]);
    const last = recording.text(table.column("last")[row]);
    found.get(rank).push({ name, last, given: table.column("given")[row], until_s: null });
  }
  return found;
}

/** Bytes of device memory that live on a rank at a step, by category. */
export function memoryAt(recording, rank, index) {
  const series = recording.series("memory");
  const bytes = recording.tables.memory.column("bytes");
  const held = {};
  recording.about.categories.forEach((category, i) => {
    const row = series.at(pairKey(rank, i), index);
    held[category.name] = row < 0 ? 0 : bytes[row];
  });
  return held;
}

/** The most that lived on a rank up to a step, in bytes. */
export function peakAt(recording, rank, index) {
  const row = recording.series("peaks").at(rank, index);
  return row < 0 ? 0 : recording.tables.peaks.column("bytes")[row];
}

function comingOf(recording, rank, next) {
  if (next >= 0) return opAt(recording, next);
  const { coming } = recording.tables;
  const row = coming.column("rank").subarray(0, coming.n).indexOf(rank);
  return row < 0 ? null : opAt(recording, row, coming);
}

function rankAt(recording, rank, index, op, failed, parts) {
  const { standing: standings, marks } = recording.tables;
  const own = recording.taken(rank);
  const count = countBelow(own, index);
  const last = count ? opAt(recording, own[count - 1]) : null;
  const coming = comingOf(recording, rank, count < own.length ? own[count] : -1);
  const row = recording.series("standing").at(rank, index);
  const stands = (name) => (row < 0 ? "" : recording.text(standings.column(name)[row]));
  let state = stands("state") || "not begun";
  if (op && op.rank === rank) state = "next";
  if (failed === rank) state = "failed";
  const here = state === "failed" ? last : coming || last;
  const mark = recording.series("marks").at(rank, index);
  return {
    rank,
    coords: { ...recording.about.coords[recording.ranks.indexOf(rank)] },
    state,
    line: stands("where") || (!here || state === "ended" ? "" : here.line),
    waits_in: stands("what"),
    last,
    next: coming,
    steps: count,
    mark: mark < 0 ? "" : recording.text(marks.column("mark")[mark]),
    hbm: memoryAt(recording, rank, index),
    peak_bytes: peakAt(recording, rank, index),
    streams: parts.streams.get(rank) || [],
    works: parts.works.get(rank) || [],
    host_s: null,
  };
}

/**
 * Everything at a step but tensors and times. Sizes are in bytes.
 * @param {Recording} recording
 * @param {number} index steps taken, 0 to `recording.last`
 */
export function shownAt(recording, index) {
  const { about } = recording;
  const ended = index >= recording.known;
  const error = ended && recording.ended ? recording.error : null;
  const op = ended ? null : opAt(recording, index);
  const open = waiting(recording, index);
  const parts = { streams: streams(recording, index), works: works(recording, index, open) };
  const failed = error && typeof error.rank === "number" && error.rank >= 0 ? error.rank : null;
  return {
    index,
    known: recording.known,
    ended,
    error: error ? { kind: error.kind, message: error.message } : null,
    op,
    mesh: { ...about.mesh },
    cluster: about.cluster,
    capacity_bytes: about.capacity_bytes,
    provisional_s: null,
    messages: messages(recording, open),
    collectives: collectives(recording, open),
    ranks: recording.ranks.map((rank) => rankAt(recording, rank, index, op, failed, parts)),
  };
}

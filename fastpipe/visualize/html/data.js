// Columns, searches in them, and what an action is called.

function decode(columns) {
  const types = { Uint8Array, Uint16Array, Int32Array, Float32Array, Float64Array };
  const decoded = {};
  for (const [name, [type, text]] of Object.entries(columns)) {
    const binary = atob(text);
    const bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    decoded[name] = new types[type](bytes.buffer);
  }
  return decoded;
}

const bars = decode(DATA.bars);
const messages = decode(DATA.messages);
const memory = decode(DATA.memory);
const FUSED = DATA.ops.indexOf("OVERLAP_F_B");
const LENGTH = Math.max(DATA.makespan, 1e-12);

// The latest end so far: unlike the ends themselves it never falls, so it can be searched.
function reach(first, last, end, into) {
  let latest = -Infinity;
  for (let i = first; i < last; i++) into[i] = latest = Math.max(latest, end[i]);
}

bars.reach = new Float64Array(bars.end.length);
for (let rank = 0; rank < DATA.ranks; rank++) reach(bars.first[rank], bars.first[rank + 1], bars.end, bars.reach);
messages.reach = new Float64Array(messages.end.length);
reach(0, messages.end.length, messages.end, messages.reach);

// The first index of sorted values[low..high) whose value is above x.
function above(values, x, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > x) high = middle; else low = middle + 1;
  }
  return low;
}

// The bars of a rank that a stretch of time shows: [low, high).
function visible(rank, from, to) {
  const first = bars.first[rank], last = bars.first[rank + 1];
  return [above(bars.reach, from, first, last), above(bars.start, to, first, last)];
}

function rankOf(index) {
  return above(bars.first, index, 0, DATA.ranks + 1) - 1;
}

// What is drawn of a bar: kind, shade and microbatch of the whole, or of the two halves.
function parts(index) {
  const op = bars.op[index];
  if (op !== FUSED) return [{ kind: DATA.ops[op], chunk: bars.chunk[index], microbatch: bars.microbatch[index], stage: bars.stage[index] }];
  return [
    { kind: "F", chunk: bars.chunk[index], microbatch: bars.microbatch[index], stage: bars.stage[index] },
    { kind: "B", chunk: bars.pairChunk[index] - 1, microbatch: bars.pairMicrobatch[index] - 1, stage: bars.pairStage[index] - 1 },
  ];
}

function label(index) {
  return parts(index).map((part) => `${part.stage}${part.kind}${part.microbatch}`).join(" & ");
}

const UNIT = LENGTH >= 1 ? [1, "s"] : LENGTH >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];

function duration(value) {
  return `${Number((value * UNIT[0]).toPrecision(6))} ${UNIT[1]}`;
}

function needs(index) {
  const found = [bars.needs0[index], bars.needs1[index], bars.needs2[index]];
  return [...new Set(found.filter((value) => value > 0))].map((value) => value - 1);  // a pair may need another twice
}

// What kept a bar from starting earlier, as a sentence.
function waiting(index) {
  const decided = bars.decided[index] - 1;
  if (decided < 0) return "waited for nothing";
  const rank = rankOf(index);
  const earlier = rankOf(decided) === rank && decided === index - 1 && !needs(index).includes(decided);
  const what = `${label(decided)} of rank ${rankOf(decided)}, which ended at ${duration(bars.end[decided])}`;
  return earlier ? `waited for its rank: ${what}` : `waited for ${what}`;
}

function describe(index) {
  const meanings = parts(index).map((part) => `${DATA.meanings[part.kind].replace(/^\S+\s+/, "")}, stage ${part.stage}, microbatch ${part.microbatch}`);
  const lines = [
    `rank ${rankOf(index)}: ${meanings.join("; ")}`,
    `start ${duration(bars.start[index])}, end ${duration(bars.end[index])}, took ${duration(bars.end[index] - bars.start[index])}`,
    waiting(index),
  ];
  const others = needs(index).filter((other) => other !== bars.decided[index] - 1);
  if (others.length) lines.push("also needed " + others.map((other) => `${label(other)} (ended at ${duration(bars.end[other])})`).join(", "));
  if (bars.critical[index]) lines.push("on the critical path");
  return lines;
}

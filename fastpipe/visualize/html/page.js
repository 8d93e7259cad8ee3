// What the user does: wheel, drag, hover, click, keys.

const tip = document.getElementById("tip");
let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    drawTimeline();
    drawMemory();
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  });
}

function show(from, to) {
  const least = LENGTH * 1e-7;
  let width = Math.min(Math.max(to - from, least), LENGTH);
  view.from = Math.min(Math.max(0, from), LENGTH - width);
  view.to = view.from + width;
  redraw();
}

function zoom(factor, time) {
  show(time - (time - view.from) * factor, time + (view.to - time) * factor);
}

function resize() {
  layout();
  redraw();
}

// The bar at a place of the canvas, or -1.
function barAt(x, y) {
  const rank = Math.floor(y / view.row);
  if (rank < 0 || rank >= DATA.ranks || x < LEFT || x > LEFT + view.width) return -1;
  const time = timeAt(x), reach = 2 * (view.to - view.from) / view.width;
  const [low, high] = visible(rank, time - reach, time + reach);
  let best = -1, least = Infinity;
  for (let index = low; index < high; index++) {
    const distance = Math.max(bars.start[index] - time, time - bars.end[index], 0);
    const [, top, , height] = boxOf(index, rank, 0, 1);
    if (DATA.tracks > 1 && (y < top || y > top + height)) continue;
    if (distance < least) { best = index; least = distance; }
  }
  return least <= reach / 4 ? best : -1;
}

function idleText(x, y) {
  const rank = Math.floor(y / view.row);
  if (rank < 0 || rank >= DATA.ranks || x < LEFT || x > LEFT + view.width) return null;
  const first = bars.first[rank], last = bars.first[rank + 1], next = above(bars.start, timeAt(x), first, last);
  const from = next > first ? bars.reach[next - 1] : 0, to = next < last ? bars.start[next] : LENGTH;
  const lines = [`rank ${rank}: idle for ${duration(to - from)}, from ${duration(from)} to ${duration(to)}`];
  if (next < last) lines.push(`then ${label(next)}, which ${waiting(next)}`);
  return ["idle", lines];
}

function fillTip(heading, lines) {
  tip.replaceChildren();
  const bold = document.createElement("b");
  bold.textContent = heading;
  tip.append(bold);
  for (const line of lines) {
    const row = document.createElement("div");
    row.textContent = line;
    tip.append(row);
  }
}

function moveTip(event) {
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > window.innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
  const top = Math.min(event.clientY + 16, window.innerHeight - box.height - 6);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hover(event) {
  const index = barAt(event.offsetX, event.offsetY);
  const text = index >= 0 ? [label(index), describe(index)] : idleText(event.offsetX, event.offsetY);
  tip.hidden = text === null;
  if (text) { fillTip(...text); moveTip(event); }
  if (index !== state.hover) { state.hover = index; redraw(); }
}

function select(rank, index) {
  state.rank = rank;
  state.selected = index;
  const text = index < 0 ? `rank ${rank}` : `${label(index)}  \u2013  ${describe(index).join("; ")}`;
  const line = document.getElementById("selected");
  line.textContent = line.title = text;
  document.querySelector(".help").hidden = true;
  redraw();
}

function click(event) {
  const rank = Math.floor(event.offsetY / view.row);
  if (rank >= 0 && rank < DATA.ranks) select(rank, barAt(event.offsetX, event.offsetY));
}

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  drag = { x: event.offsetX, from: view.from, to: view.to, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return hover(event);
  if (Math.abs(event.offsetX - drag.x) > 3) drag.moved = true;
  if (!drag.moved) return;
  tip.hidden = true;
  canvas.classList.add("dragging");
  const time = (drag.x - event.offsetX) / view.width * (drag.to - drag.from);
  show(drag.from + time, drag.to + time);
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) click(event);
  drag = null;
  canvas.classList.remove("dragging");
});
canvas.addEventListener("pointerleave", () => {
  tip.hidden = true;
  state.hover = -1;
  redraw();
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const span = view.to - view.from;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const time = (event.deltaX || event.deltaY) / view.width * span;
    show(view.from + time, view.to + time);
  } else {
    zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.002), timeAt(event.offsetX));
  }
  hover(event);
}, { passive: false });
canvas.addEventListener("dblclick", () => show(0, LENGTH));
document.getElementById("fit").addEventListener("click", () => show(0, LENGTH));

document.addEventListener("keydown", (event) => {
  const middle = (view.from + view.to) / 2, tenth = (view.to - view.from) / 10;
  const actions = {
    "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle),
    ArrowLeft: () => show(view.from - tenth, view.to - tenth), ArrowRight: () => show(view.from + tenth, view.to + tenth),
    0: () => show(0, LENGTH),
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  actions[event.key]();
});

function bind(id, name, initial) {
  const box = document.getElementById(id);
  box.checked = state[name] = initial;
  box.addEventListener("change", () => { state[name] = box.checked; redraw(); });
}

function legendEntry(text, style) {
  const entry = document.createElement("span"), swatch = document.createElement("i");
  Object.assign(swatch.style, style);
  entry.append(swatch, text);
  document.getElementById("legend").append(entry);
}

function head() {
  const stages = DATA.stages === DATA.ranks ? "" : `, ${DATA.stages} stages`;
  document.getElementById("title").textContent = DATA.name;
  document.getElementById("numbers").textContent =
    `${DATA.ranks} ranks${stages}, ${DATA.microbatches} microbatches \u00b7 ${DATA.measured ? "measured" : "simulated"}: ` +
    `makespan ${duration(DATA.makespan)}, bubble ${(100 * DATA.bubble).toFixed(1)}%`;
  for (const kind of DATA.kinds) legendEntry(DATA.meanings[kind], { background: DATA.shades[kind][0] });
  const half = (a, b, way) => ({ background: `linear-gradient(to ${way}, ${a} 50%, ${b} 50%)` });
  if (DATA.fused) legendEntry("F and B overlapped", half(DATA.shades.F[0], DATA.shades.B[0], "bottom"));
  const shades = DATA.shades.F;
  if (shades.length > 1) legendEntry("lighter: later stage of the rank", half(shades[0], shades[shades.length - 1], "right"));
  legendEntry("critical path", { border: `2px solid ${DATA.critical}` });
  legendEntry(DATA.meanings.comm, { height: "2px", verticalAlign: "4px", background: DATA.transfer });
}

// For tests and for whoever opens the console.
window.fastpipe = {
  view, state, bars, label,
  select(index) { select(rankOf(index), index); },
  place(index) {
    const box = canvas.getBoundingClientRect(), [left, top, width, height] = boxOf(index, rankOf(index), 0, 1);
    return { x: box.left + left + width / 2, y: box.top + top + height / 2 };
  },
};

head();
bind("show-critical", "critical", false);
bind("show-transfers", "transfers", false);
window.addEventListener("resize", resize);
resize();

// The timeline's canvas: only what is visible is looked at; where actions are narrower than pixels, their mean colour.

const chart = document.getElementById("memory");
const LEFT = 74, RIGHT = 56, AXIS = 24, FILL = 0.86, CHART_LEAST = 150;
const INK = "#20282c", FAINT = "#d5dadd", SOFT = "#66737a";
const canvas = document.getElementById("timeline");
const pen = canvas.getContext("2d");
const strip = document.createElement("canvas");
const view = { from: 0, to: LENGTH, width: 100, row: 20, chart: CHART_LEAST };
const state = { hover: -1, selected: -1, rank: 0, critical: false, transfers: false };

function rgb(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

const SHADES = Object.fromEntries(Object.entries(DATA.shades).map(([kind, list]) => [kind, list.map((colour) => ({
  colour, rgb: rgb(colour), ink: rgb(colour)[0] * 0.299 + rgb(colour)[1] * 0.587 + rgb(colour)[2] * 0.114 > 110 ? "#000" : "#fff",
}))]));

function shadeOf(part) { return SHADES[part.kind][part.chunk]; }
function xOf(time) { return LEFT + (time - view.from) / (view.to - view.from) * view.width; }
function timeAt(x) { return view.from + (x - LEFT) / view.width * (view.to - view.from); }
function rowTop(rank) { return rank * view.row + view.row * (1 - FILL) / 2; }

function sizeCanvas(element, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2), width = element.clientWidth;
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  element.style.height = `${height}px`;
  element.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  return width;
}

function layout() {
  const rows = document.getElementById("rows");
  rows.style.height = "0px";
  chart.style.height = "0px";
  const used = [...document.body.children].reduce((sum, part) => sum + part.offsetHeight, 0) - rows.offsetHeight;
  const room = window.innerHeight - used - AXIS - CHART_LEAST - 10;
  view.row = Math.min(56, Math.max(5.5, Math.floor(room / DATA.ranks * 100) / 100));
  const height = Math.ceil(view.row * DATA.ranks + AXIS);
  rows.style.height = `${Math.min(height, Math.max(80, room + AXIS))}px`;
  view.chart = Math.min(260, Math.max(CHART_LEAST, room + CHART_LEAST - height + AXIS));
  view.width = sizeCanvas(canvas, height) - LEFT - RIGHT;
  sizeCanvas(chart, view.chart);
  strip.width = Math.max(1, Math.round(view.width));
  strip.height = 2 * DATA.ranks;
}

// The box of a bar, or of one half of a fused pair: left, top, width, height.
function boxOf(index, rank, half, halves) {
  const height = view.row * FILL / DATA.tracks, part = height / halves;
  const left = xOf(bars.start[index]);
  return [left, rowTop(rank) + bars.track[index] * height + half * part, xOf(bars.end[index]) - left, part];
}

function drawBars(rank, low, high) {
  const gap = view.row > 10;
  for (let index = low; index < high; index++) {
    const shown = parts(index);
    shown.forEach((part, half) => {
      const [left, top, width, height] = boxOf(index, rank, half, shown.length);
      pen.fillStyle = shadeOf(part).colour;
      pen.fillRect(left, top, Math.max(width - (gap && width > 4 ? 1 : 0), 0.7), height - (gap && half === 0 && shown.length > 1 ? 0.5 : 0));
      drawLabel(part, left, top, width, height);
    });
  }
}

const DIGIT = (() => { pen.font = "100px sans-serif"; return pen.measureText("0").width / 100; })();

// All actions of one length are labelled alike, so what decides is the longest text there could be.
const LONGEST = `${DATA.stages - 1}W${DATA.microbatches - 1}`.length;

function drawLabel(part, left, top, width, height) {
  if (width < 9 || height < 8) return;
  const short = String(part.microbatch), full = `${part.stage}${part.kind}${part.microbatch}`;
  const size = Math.min(12, Math.floor(height * 0.86), Math.max(7, Math.floor((width - 3) / DIGIT / short.length)));
  const text = width > 1.4 * DIGIT * size * LONGEST + 8 ? full : short;
  if (width < DIGIT * size * text.length + 3) return;
  const from = Math.max(left, LEFT), to = Math.min(left + width, LEFT + view.width);
  if (to - from < DIGIT * size * text.length + 3) return;
  pen.font = `${size}px sans-serif`;
  pen.fillStyle = shadeOf(part).ink;
  pen.fillText(text, (from + to) / 2, top + height / 2 + 0.5);
}

// Adds each bar's colour to the pixels it covers, in proportion; two lines a rank, for the halves of fused pairs.
function drawDense(rank, low, high, image) {
  const width = strip.width, pixels = width / (view.to - view.from);
  const sums = [new Float32Array(3 * width), new Float32Array(3 * width)];
  const covered = new Float32Array(width);
  for (let index = low; index < high; index++) {
    const from = Math.max(0, (bars.start[index] - view.from) * pixels);
    const to = Math.min(width, (bars.end[index] - view.from) * pixels);
    const shown = parts(index), upper = shadeOf(shown[0]).rgb, lower = shadeOf(shown[shown.length - 1]).rgb;
    for (let x = Math.floor(from); x < to; x++) {
      const share = Math.min(x + 1, to) - Math.max(x, from);
      covered[x] += share;
      for (let c = 0; c < 3; c++) {
        sums[0][3 * x + c] += share * upper[c];
        sums[1][3 * x + c] += share * lower[c];
      }
    }
  }
  for (let half = 0; half < 2; half++) {
    for (let x = 0; x < width; x++) {
      const at = 4 * ((2 * rank + half) * width + x), most = Math.max(1, covered[x]);
      for (let c = 0; c < 3; c++) image.data[at + c] = (sums[half][3 * x + c] + 255 * (most - covered[x])) / most;
      image.data[at + 3] = 255;
    }
  }
}

function drawRows() {
  const image = strip.getContext("2d").createImageData(strip.width, strip.height);
  const dense = [];
  for (let rank = 0; rank < DATA.ranks; rank++) {
    const [low, high] = visible(rank, view.from, view.to);
    if (high - low > view.width / 3) { drawDense(rank, low, high, image); dense.push(rank); }
    else drawBars(rank, low, high);
  }
  if (!dense.length) return;
  strip.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  const half = view.row * FILL / 2;
  for (const rank of dense) {
    for (const part of [0, 1]) pen.drawImage(strip, 0, 2 * rank + part, strip.width, 1, LEFT, rowTop(rank) + part * half, view.width, half + 0.3);
  }
}

function drawNames() {
  const every = Math.max(1, Math.ceil(11 / view.row));
  pen.font = `${Math.min(12, Math.max(9, view.row * 0.8))}px sans-serif`;
  pen.clearRect(0, 0, LEFT, view.row * DATA.ranks);
  pen.clearRect(LEFT + view.width, 0, RIGHT, view.row * DATA.ranks + AXIS);
  for (let rank = 0; rank < DATA.ranks; rank++) {
    const y = Math.max(6, (rank + 0.5) * view.row);
    if (rank === state.rank) {
      pen.fillStyle = "#e6f0f9";
      pen.fillRect(0, rank * view.row, LEFT - 4, view.row);
      pen.fillRect(LEFT + view.width + 4, rank * view.row, RIGHT, view.row);
    }
    if (rank % every) continue;
    pen.fillStyle = INK;
    pen.textAlign = "right";
    pen.fillText(`rank ${rank}`, LEFT - 10, y);
    pen.textAlign = "center";
    pen.fillText(DATA.peaks[rank], LEFT + view.width + RIGHT / 2, y);
  }
  pen.font = "10px sans-serif";
  pen.fillStyle = SOFT;
  pen.textAlign = "center";
  pen.fillText("peak live", LEFT + view.width + RIGHT / 2, view.row * DATA.ranks + 11);
}

// Round numbers, some 100 pixels apart.
function ticks() {
  const rough = (view.to - view.from) * UNIT[0] * 100 / view.width;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let n = Math.ceil(view.from * UNIT[0] / step - 1e-9); n * step <= view.to * UNIT[0] * (1 + 1e-12); n++) found.push(n * step);
  return found.map((value) => ({ x: xOf(value / UNIT[0]), text: String(Number(value.toPrecision(9))) }));
}

function drawAxis() {
  const y = view.row * DATA.ranks;
  pen.strokeStyle = FAINT;
  pen.fillStyle = INK;
  pen.lineWidth = 1;
  pen.font = "11px sans-serif";
  pen.textAlign = "center";
  pen.beginPath();
  pen.moveTo(LEFT, y + 0.5);
  pen.lineTo(LEFT + view.width, y + 0.5);
  for (const { x, text } of ticks()) {
    pen.moveTo(x, y);
    pen.lineTo(x, y + 5);
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(Math.max(x, LEFT + half - 3), LEFT + view.width - half + 3), y + 14);
  }
  pen.stroke();
  pen.textAlign = "right";
  pen.fillText(`time (${UNIT[1]})`, LEFT - 10, y + 14);
}

// The edge of a rank's bars on the side of another rank.
function edge(rank, towards) {
  return (rank + 0.5 + Math.sign(towards - rank) * FILL / 2) * view.row;
}

function drawTransfers() {
  const low = above(messages.reach, view.from, 0, messages.reach.length);
  const high = above(messages.start, view.to, 0, messages.start.length);
  if (high - low > 4000) return;
  pen.strokeStyle = DATA.transfer;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let i = low; i < high; i++) {
    pen.moveTo(xOf(messages.start[i]), edge(messages.source[i], messages.destination[i]));
    pen.lineTo(xOf(messages.end[i]), edge(messages.destination[i], messages.source[i]));
  }
  pen.stroke();
}

function outline(index, colour, width) {
  const [left, top, length, height] = boxOf(index, rankOf(index), 0, 1);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.strokeRect(left, top, Math.max(length - 1, 1), height);
}

// Neighbours on the path are outlined as one.
function drawCritical() {
  pen.strokeStyle = DATA.critical;
  pen.lineWidth = 2;
  for (const [first, last] of DATA.criticalRuns) {
    const left = xOf(bars.start[first]), right = xOf(bars.end[last]);
    if (right > LEFT && left < LEFT + view.width) pen.strokeRect(left, rowTop(rankOf(first)), Math.max(right - left - 1, 1), view.row * FILL);
  }
  pen.beginPath();
  for (const [source, destination, start, end] of DATA.criticalTransfers) {
    pen.moveTo(xOf(start), edge(source, destination));
    pen.lineTo(xOf(end), edge(destination, source));
  }
  pen.stroke();
}

function drawSelected() {
  for (const index of new Set([state.selected, state.hover])) {
    if (index < 0) continue;
    outline(index, "#000", index === state.selected ? 2.5 : 1.5);
    pen.strokeStyle = "#000";
    pen.lineWidth = 1.2;
    for (const other of needs(index)) {
      outline(other, "#000", 1.2);
      if (rankOf(other) === rankOf(index)) continue;
      pen.beginPath();
      pen.moveTo(xOf(bars.end[other]), (rankOf(other) + 0.5) * view.row);
      pen.lineTo(xOf(bars.start[index]), (rankOf(index) + 0.5) * view.row);
      pen.stroke();
    }
  }
}

function drawTimeline() {
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.textBaseline = "middle";
  pen.save();
  pen.beginPath();
  pen.rect(LEFT - 1, 0, view.width + 2, canvas.height);
  pen.clip();
  pen.textAlign = "center";
  drawRows();
  if (state.transfers) drawTransfers();
  if (state.critical) drawCritical();
  drawSelected();
  pen.restore();
  drawNames();
  drawAxis();
}

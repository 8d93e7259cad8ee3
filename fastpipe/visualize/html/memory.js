// The chart beneath: live stage activations over time, one rank in colour, the others grey behind it.

const brush = chart.getContext("2d");
const CHART_TOP = 26, CHART_BOTTOM = 12;
const HIGHEST = Math.max(1, ...DATA.peaks);
const CROWD = 128;

function levelY(level) {
  return view.chart - CHART_BOTTOM - level / HIGHEST * (view.chart - CHART_TOP - CHART_BOTTOM);
}

// A rank's steps as a path: the highest level of every pixel where there are many.
function stepPath(rank) {
  const first = memory.first[rank], last = memory.first[rank + 1];
  const low = above(memory.time, view.from, first, last), high = above(memory.time, view.to, low, last);
  const before = low > first ? memory.level[low - 1] : 0;
  const path = new Path2D();
  path.moveTo(LEFT, levelY(before));
  const merge = high - low > 2 * view.width;
  let level = before, pixel = -1, peak = 0;
  for (let i = low; i < high; i++) {
    const x = xOf(memory.time[i]);
    if (merge && Math.floor(x) === pixel) { peak = Math.max(peak, memory.level[i]); continue; }
    if (merge && pixel >= 0) level = peak;
    path.lineTo(x, levelY(level));
    level = peak = memory.level[i];
    pixel = Math.floor(x);
    path.lineTo(x, levelY(level));
  }
  if (merge) level = high > low ? memory.level[high - 1] : before;
  path.lineTo(LEFT + view.width, levelY(level));
  return path;
}

function drawChartAxis() {
  brush.font = "11px sans-serif";
  brush.textBaseline = "middle";
  brush.textAlign = "right";
  brush.lineWidth = 1;
  const step = Math.max(1, Math.ceil(HIGHEST / 4));
  for (let level = 0; level <= HIGHEST; level += step) {
    brush.strokeStyle = FAINT;
    brush.beginPath();
    brush.moveTo(LEFT, levelY(level) + 0.5);
    brush.lineTo(LEFT + view.width, levelY(level) + 0.5);
    brush.stroke();
    brush.fillStyle = INK;
    brush.fillText(level, LEFT - 10, levelY(level));
  }
  brush.textAlign = "left";
  const others = DATA.ranks > 1 ? "; grey: the other ranks" : "";
  brush.fillText(`live stage activations of rank ${state.rank}, at most ${DATA.peaks[state.rank]}${others}`, LEFT, 12);
}

function drawMemory() {
  brush.clearRect(0, 0, chart.width, chart.height);
  drawChartAxis();
  brush.save();
  brush.beginPath();
  brush.rect(LEFT, 0, view.width, view.chart);
  brush.clip();
  brush.strokeStyle = "#c3cbd0";
  const every = Math.max(1, Math.ceil(DATA.ranks / CROWD));
  for (let rank = 0; rank < DATA.ranks; rank += every) if (rank !== state.rank) brush.stroke(stepPath(rank));
  const own = stepPath(state.rank), colour = DATA.shades.F[0], area = new Path2D(own);
  area.lineTo(LEFT + view.width, levelY(0));
  area.lineTo(LEFT, levelY(0));
  brush.fillStyle = colour + "33";
  brush.fill(area);
  brush.strokeStyle = colour;
  brush.lineWidth = 2;
  brush.stroke(own);
  brush.restore();
}

// --- the shape of a chart --------------------------------------------------------------------------------------------

// A chart is {runs: [{name, look, series: [{label, style, values, and steps and seconds, or x}]}]}, and where it has them
//   x: {label, log, low, high, ticks}   an axis of its own; without it the axis is that of the run, steps or time
//   unit, log, low, high, frame         of the values; chosen: linear or logarithmic as the reader likes
//   grouped                             the series of a run have one entry in the legend, the one that is listed
//   marks                               moves and recoveries above the curves
//   arrows, reach, strips               differences pointed out; values that must be in the frame; rows of phases
// Series may have tips, labels and errors ([low, high]) for every point, and a place among several of one run.
const NAMES = [...document.querySelectorAll('[data-chart]')].map(holder => holder.dataset.chart);
const RUN_COLOURS = ['series-2', 'series-1', 'series-3', 'series-6', 'series-5', 'series-4', 'series-7', 'series-0'];
const OWN = { thin: 'series-2', bold: 'series-0', plain: 'series-2', dashed: 'series-1', edge: 'series-1', dots: 'series-4', reference: 'series-0' };
const WIDTHS = { bold: 2.5, thin: 1.2, dashed: 1.6, edge: .8, dots: 0, seed: 1.2, mean: 2, end: 0, ends: 0, reference: 1 };
const FAINT = { thin: .8, edge: .35, seed: .75, ends: .75 };
const PHASES = ['warmup', 'full', 'correct', 'predict'];
const MARKS = { 'kept': 'good', 'shrunk': 'good', 'refused': 'muted', 'rolled back': 'bad', 'recovery': 'caution', 'resumed': 'ink', 'not finite': 'bad' };
const LANES = [['kept', 'shrunk'], ['refused', 'rolled back'], ['recovery', 'not finite', 'resumed']];
const RIBBON = 7, GAP = 3, LANE = 14, ROW = 46, FONT = '12.5px system-ui, sans-serif';
const runColour = place => style(RUN_COLOURS[place % RUN_COLOURS.length]);
const colourOf = (run, one, place) => run.look != null ? style(`series-${run.look}`) : one.place != null && !several() ? runColour(one.place) : several() && one.style !== 'reference' ? runColour(place) : style(OWN[one.style] || 'series-0');
const faded = (colour, share) => colour + Math.round(share * 255).toString(16).padStart(2, '0');
const ratioOf = () => devicePixelRatio || 1;

const drawn = new Map();
const axis = { x: 'step', cut: true, asked: false };
axis.log = data.loss?.log;
const isTime = name => !data[name].x && axis.x === 'time';
const across = (name, value) => isTime(name) ? duration(value) : data[name].x ? shown(value) : whole(value);
const acrossLabel = name => data[name].x?.label ?? axis.x;
const placesOf = (name, one) => one.x ?? (isTime(name) ? one.seconds : one.steps);
const placeOf = () => axis.x === 'time' ? 1 : 0;
const logOf = name => data[name].chosen ? axis.log : !!data[name].log;

// A few wild values do not flatten all others: above this they leave the frame, and their height is written there. What
// a curve begins with is never cut off.
function ceiling(name, log) {
  const rest = [];
  let high = -Infinity;
  for (const run of data[name].runs) for (const one of run.series) {
    const first = Math.ceil(one.values.length / 50);
    one.values.forEach((value, place) => { if (value != null) { if (place < first) high = Math.max(high, value); else rest.push(value); } });
  }
  rest.sort((a, b) => a - b);
  const usual = rest[Math.floor(rest.length * .98)] ?? 0, limit = usual * (log ? 100 : 8);
  return usual > 0 && rest.at(-1) > Math.max(limit, high) ? Math.max(high, usual * (log ? 10 : 2)) : Infinity;
}

// [lowest, highest] that is shown. A forecast may be absurd: its chart goes by what came, and a little beyond.
function bounds(name, log) {
  if (!axis.cut) return [-Infinity, Infinity];
  return data[name].frame?.[log ? 'log' : 'linear'] ?? [-Infinity, ceiling(name, log)];
}

function columns(name) {
  const { runs, grouped, x: own, strips } = data[name], tables = [], series = [{}], bands = [], log = logOf(name);
  if (strips) tables.push([[0, ...strips.map(strip => strip.end)].sort((a, b) => a - b).filter((at, place, all) => at !== all[place - 1]), []]);
  runs.forEach((run, place) => run.series.forEach(one => {
    tables.push([placesOf(name, one), log ? one.values.map(value => value > 0 ? value : null) : one.values]);
    const colour = colourOf(run, one, place);
    const few = one.values.length < 60;
    const lone = one.values.filter(value => value != null).length === 1; // no line goes through a single point
    const dotted = one.style === 'dots' || (few && (one.style === 'bold' || (own && one.style !== 'reference'))) || lone;
    const made = {
      label: grouped ? (one.listed ? run.name : one.label) : several() && one.style !== 'reference' ? `${run.name}: ${one.label}` : one.label,
      said: one.label,
      group: grouped ? place : -series.length,
      class: grouped && !one.listed ? 'unlisted' : null,
      look: run.look,
      source: one,
      colour,
      scale: 'y',
      stroke: faded(colour, one.style === 'thin' && several() ? .55 : FAINT[one.style] ?? 1),
      width: WIDTHS[one.style] ?? 1.6,
      dash: { dashed: [6, 4], reference: [3, 3] }[one.style] ?? data.looks?.[run.look]?.dash,
      dotted,
      points: { show: dotted && run.look == null, size: one.style === 'dots' ? 3.5 : 6, fill: one.style === 'dots' ? faded(colour, .6) : style('surface'), stroke: colour },
      value: (u, value) => value == null ? '' : shown(value),
    };
    series.push(made);
    if (one.style === 'edge' && one.label.startsWith('upper')) bands.push({ series: [series.length - 1, series.length - 2], fill: faded(colour, .12) });
  }));
  // Runs and curves have places of their own: where one has no entry its line goes on, where its value is missing
  // (mode 2) the line is cut up to its next value.
  const table = tables.length ? uPlot.join(tables, tables.map(() => [0, 2])) : null;
  if (strips) series.push({ label: 'phases', said: 'phases', class: 'unlisted', width: 0, points: { show: false } });
  const [bottom, top] = bounds(name, log);
  return { table, series, bands, bottom, top };
}

// --- ribbon, marks, units --------------------------------------------------------------------------------------------

// The phase ribbon of every run lies under the plot; marks of moves and recoveries stand in lanes above the curves.
const ribbonHeight = name => data[name].x || data.shared.prediction !== 'tried' ? 0 : data.shared.runs.length * (RIBBON + GAP) + 4;
function lanes(name) {
  if (!data[name].marks) return [];
  if (several()) return data.shared.runs.map((run, row) => [run, null, runColour(row)]);
  const [run] = data.shared.runs, kinds = new Set(run.marks.map(mark => mark[2]));
  return LANES.filter(lane => lane.some(kind => kinds.has(kind))).map(lane => [run, lane, null]);
}

function paint(u, name) {
  const ctx = u.ctx, ratio = ratioOf(), place = placeOf(), { top, height } = u.bbox;
  ctx.save();
  ctx.setLineDash([]);
  if (ribbonHeight(name)) data.shared.runs.forEach((run, row) => {
    const stretches = run.phases.slice(0, -1).map((phase, index) => [phase[place], run.phases[index + 1][place], phase[2], phase[3]]);
    ribbon(u, stretches, top + height + (4 + row * (RIBBON + GAP)) * ratio, RIBBON);
  });
  lanes(name).forEach(([run, kinds, colour], row) => lane(u, run.marks, place, top + (8 + row * LANE) * ratio, kinds, colour));
  data[name].strips?.forEach((strip, row) => {
    const y = top + row * ROW * ratio;
    words(ctx, strip.name, u.bbox.left + 2 * ratio, y + 12 * ratio, 'left', 'ink');
    lane(u, strip.marks, 1, y + 24 * ratio);
    ribbon(u, strip.phases, y + 31 * ratio, 11);
  });
  u.series.forEach((one, index) => { if (index && one.show && one.look != null) points(u, one); });
  arrows(u, name);
  units(u, name, ctx, ratio);
  beyond(u, name, ctx, ratio);
  ctx.restore();
}

// Stretches of phases as a band; of phases too short to be seen one by one the height is their share.
function ribbon(u, stretches, y, tall) {
  const ctx = u.ctx, ratio = ratioOf(), { left, width } = u.bbox;
  for (const [from, to, phase, share] of stretches.toSorted((a, b) => PHASES.indexOf(a[2]) - PHASES.indexOf(b[2]))) {
    const start = Math.max(left, u.valToPos(from, 'x', true)), end = Math.min(left + width, u.valToPos(to, 'x', true));
    if (end < left || start > left + width) continue;
    const wide = Math.max(end - start, 2 * ratio), high = share === 1 ? tall : Math.max(2.5, tall * share);
    ctx.fillStyle = style('phase-full');
    if (share !== 1) ctx.fillRect(start, y, wide, tall * ratio);
    ctx.fillStyle = style(`phase-${phase}`);
    ctx.fillRect(start, y + (tall - high) * ratio, wide, high * ratio);
  }
}

// Marks in a row; one stands for those that it would cover.
function lane(u, marks, place, y, kinds, colour) {
  const last = new Map(), ratio = ratioOf(), { left, width } = u.bbox;
  for (const mark of marks) {
    const x = u.valToPos(mark[place], 'x', true);
    if (x < left || x > left + width || (kinds && !kinds.includes(mark[2]))) continue;
    if (x - (last.get(mark[2]) ?? -Infinity) < 9 * ratio) continue;
    last.set(mark[2], x);
    shape(u.ctx, mark[2], x, y, ratio, colour);
  }
}

function words(ctx, text, x, y, side, ink = 'muted') {
  const ratio = ratioOf();
  ctx.font = FONT.replace(/^[\d.]+/, size => size * ratio);
  ctx.textAlign = side;
  ctx.textBaseline = 'middle';
  ctx.strokeStyle = style('surface');
  ctx.lineWidth = 4 * ratio;
  ctx.lineJoin = 'round';
  ctx.strokeText(text, x, y);
  ctx.fillStyle = style(ink);
  ctx.fillText(text, x, y);
}

// The points of a series of a comparison, each arm with a shape of its own; on a long line only some of them.
function points(u, one) {
  const { x: places, values, errors, labels, style: kind } = one.source, ctx = u.ctx, ratio = ratioOf(), { left, top, width, height } = u.bbox;
  let found = places.map((place, index) => [u.valToPos(place, 'x', true), u.valToPos(values[index], 'y', true), index])
    .filter(([x, y, index]) => values[index] != null && x >= left - 1 && x <= left + width + 1 && y >= top - 1 && y <= top + height + 1);
  if (one.width && found.length > 12) found = [0, 1, 2, 3, 4, 5].map(part => found[Math.floor(found.length * (part + .2 + one.look / 16) / 6)]);
  const hollow = FAINT[kind], size = (hollow ? 2.8 : 4.6) * ratio, path = new Path2D(data.looks[one.look].shape);
  for (const [x, y, index] of found) {
    ctx.strokeStyle = one.colour;
    if (errors?.[index]) {
      ctx.lineWidth = 1.6 * ratio;
      const ends = errors[index].map(end => Math.min(top + height, Math.max(top, u.valToPos(end, 'y', true))));
      ctx.beginPath();
      ctx.moveTo(x, ends[0]); ctx.lineTo(x, ends[1]);
      for (const end of ends) { ctx.moveTo(x - 4 * ratio, end); ctx.lineTo(x + 4 * ratio, end); }
      ctx.stroke();
    }
    ctx.save();
    ctx.translate(x, y);
    ctx.scale(size, size);
    ctx.lineWidth = 1.4 * ratio / size;
    ctx.fillStyle = hollow ? style('surface') : one.colour;
    ctx.fill(path);
    if (hollow) ctx.stroke(path);
    ctx.restore();
    if (labels?.[index]) words(ctx, labels[index], x + (x > left + width * .8 ? -8 : 8) * ratio, y - 11 * ratio, x > left + width * .8 ? 'right' : 'left');
  }
}

// A text that would cover another goes above it.
function arrows(u, name) {
  const ctx = u.ctx, ratio = ratioOf(), { left, width } = u.bbox, taken = [];
  for (const { start, end, text, look } of data[name].arrows ?? []) {
    const [from, to] = [start, end].map(([x]) => Math.min(left + width, Math.max(left, u.valToPos(x, 'x', true))));
    const y = u.valToPos(start[1], 'y', true), way = Math.sign(to - from) * 6 * ratio;
    if (Math.abs(to - from) < 2 * ratio) continue;
    ctx.strokeStyle = style(`series-${look}`);
    ctx.lineWidth = 1.6 * ratio;
    ctx.beginPath();
    ctx.moveTo(from, y); ctx.lineTo(to, y);
    ctx.moveTo(to - way, y - 3 * ratio); ctx.lineTo(to, y); ctx.lineTo(to - way, y + 3 * ratio);
    ctx.stroke();
    if (Math.abs(to - from) < 24 * ratio) continue;
    const beside = way > 0 ? to < left + width - 52 * ratio : to > left + 52 * ratio;
    let height = beside ? y : y - 9 * ratio;
    while (taken.some(([x, other]) => Math.abs(x - to) < 48 * ratio && Math.abs(other - height) < 13 * ratio)) height -= 13 * ratio;
    taken.push([to, height]);
    words(ctx, text, beside ? to + way : to, height, (way > 0) === beside ? 'left' : 'right', 'ink');
  }
}

function units(u, name, ctx, ratio) {
  const { left, top, width, height } = u.bbox, own = data[name].x;
  ctx.font = FONT.replace(/^[\d.]+/, size => size * ratio);
  if (data[name].unit) words(ctx, data[name].unit, own ? 4 * ratio : left, top - 13 * ratio, 'left');
  const half = own ? ctx.measureText(own.label).width / 2 : 0, middle = Math.max(half, Math.min(left + width / 2, ctx.canvas.width - half));
  if (own) words(ctx, own.label, middle, top + height + 40 * ratio, 'center');
  else words(ctx, axis.x, left - 12 * ratio, top + height + (ribbonHeight(name) + 10) * ratio, 'right');
}

// Values above the frame: an arrow where they are, with the highest of those that lie together.
function beyond(u, name, ctx, ratio) {
  const { left, top, width } = u.bbox, limit = drawn.get(name)?.top ?? Infinity, found = [];
  if (limit === Infinity) return;
  u.series.forEach((one, index) => {
    if (!index || !one.show || !one.width) return;  // not of steps that were taken back
    u.data[index].forEach((value, at) => {
      const x = value > limit ? u.valToPos(u.data[0][at], 'x', true) : -1;
      if (x < left || x > left + width) return;
      const near = found.find(other => Math.abs(other.x - x) < 120 * ratio);
      if (!near) found.push({ x, value }); else if (value > near.value) Object.assign(near, { x, value });
    });
  });
  const y = top + (lanes(name).length * LANE + 12) * ratio;
  for (const { x, value } of found) {
    const right = x > left + width - 100 * ratio, text = right ? `up to ${shown(value, 3)} ↑` : `↑ up to ${shown(value, 3)}`;
    words(ctx, text, x + (right ? 4 : -4) * ratio, y, right ? 'right' : 'left', 'bad');
  }
}

function shape(ctx, kind, x, y, ratio, colour) {
  const s = 4.2 * ratio;
  ctx.strokeStyle = ctx.fillStyle = colour || style(MARKS[kind] || 'muted');
  ctx.lineWidth = 1.6 * ratio;
  ctx.beginPath();
  if (kind === 'kept' || kind === 'shrunk') {
    ctx.moveTo(x, y - s); ctx.lineTo(x + s, y + s * .8); ctx.lineTo(x - s, y + s * .8); ctx.closePath();
    if (kind === 'kept') ctx.fill(); else ctx.stroke();
  } else if (kind === 'refused') {
    ctx.arc(x, y, s * .85, 0, 7); ctx.stroke();
  } else if (kind === 'rolled back') {
    ctx.moveTo(x - s, y - s); ctx.lineTo(x + s, y + s); ctx.moveTo(x + s, y - s); ctx.lineTo(x - s, y + s); ctx.stroke();
  } else if (kind === 'resumed') {
    ctx.moveTo(x, y - s); ctx.lineTo(x, y + s); ctx.stroke();
  } else {
    ctx.moveTo(x, y - s); ctx.lineTo(x + s, y); ctx.lineTo(x, y + s); ctx.lineTo(x - s, y); ctx.closePath();
    if (kind === 'not finite') ctx.stroke(); else ctx.fill();
  }
}

// --- axes ------------------------------------------------------------------------------------------------------------

// On a logarithmic axis powers of ten, as many as there is room for; 1, 2 and 5 of each where they are few; equal steps
// where the axis has not even two of these.
function powers(u, place, low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const room = Math.max(2, (place ? u.bbox.height / 34 : u.bbox.width / 80) / ratioOf()), every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / room));
  const steps = (Math.log10(high) - Math.log10(low)) * 3 <= room ? [1, 2, 5] : [1], found = [];
  for (let power = Math.ceil(first / every) * every; power <= last; power += every)
    for (const step of steps) if (step * 10 ** power >= low && step * 10 ** power <= high) found.push(+(step * 10 ** power).toPrecision(3));
  if (found.length > 1) return found;
  const rough = (high - low) / Math.min(4, room), size = 10 ** Math.floor(Math.log10(rough));
  const even = size * ([1, 2, 5].find(step => step * size >= rough) ?? 10), ticks = [];
  for (let tick = Math.ceil(low / even); tick * even <= high; tick++) ticks.push(+(tick * even).toPrecision(6));
  return ticks;
}

function options(name, holder, made) {
  const grid = { stroke: style('grid'), width: 1 }, ink = style('muted'), below = ribbonHeight(name), log = logOf(name);
  const { x: own, unit, strips, grouped } = data[name], plain = { stroke: ink, grid, ticks: { show: false }, font: FONT };
  const powersOf = { splits: powers, filter: (u, ticks) => ticks };
  const bottom = { ...plain, gap: below + 4, size: (own ? 52 : 34) + below, values: (u, ticks) => ticks.map(tick => across(name, tick)), space: 70, ...(own?.log ? powersOf : {}) };
  if (own?.ticks?.length) Object.assign(bottom, powersOf, { splits: (u, side, low, high) => own.ticks.filter(tick => tick >= low && tick <= high) });
  const side = { ...plain, size: 62, values: (u, ticks) => ticks.map(tick => tick == null ? '' : shown(tick)), ...(log ? powersOf : {}), show: !strips };
  // At first everything, with some air around it.
  const everything = (u, low, high) => {
    const xs = u.data[0];
    if (low !== xs[0] || high !== xs.at(-1)) return [low, high];
    if (!own) return [0, Math.max(...data.shared.runs.map(run => run.phases.at(-1)[placeOf()]), high)];
    const air = own.log ? (high / low) ** .04 || 1 : (high - low) * .03 || 1;
    return [own.low ?? (own.log ? low / air : low - air), own.high ?? (own.log ? high * air : high + air)];
  };
  made.series[0] = { label: acrossLabel(name), said: acrossLabel(name), value: (u, value) => value == null ? '' : across(name, value) };
  return {
    width: Math.max(260, holder.clientWidth), height: +holder.dataset.height || 300, padding: [unit ? 24 : 10, null, null, null],
    scales: { x: { time: false, distr: own?.log ? 3 : 1, range: everything }, y: { distr: log ? 3 : 1, range: range(name, log) } },
    axes: [bottom, side], series: made.series, bands: made.bands,
    cursor: { ...(own ? {} : { sync: { key: 'x', setSeries: false } }), points: { size: 7, show: !grouped && !strips }, y: !grouped && !strips, drag: { x: true, y: false } },
    legend: { show: !strips, live: !grouped },
    hooks: {
      draw: [u => paint(u, name)],
      setSelect: [u => { if (u.select.width > 2) drawn.get(name).zoomed = true; }],
      setCursor: [u => tip(u, name)],
      setSeries: [(u, index, { show }) => {
        if (grouped && index && show != null) u.series.forEach((one, other) => { if (other && other !== index && one.group === u.series[index].group) u.setSeries(other, { show }, false); });
      }],
    },
  };
}

// The values in view, with room for the marks above the curve, up to the height above which they are cut off.
const range = (name, log) => (u, low, top) => {
  const { low: floor, high: roof, x: own, reach } = data[name], air = own ? .04 : 0;
  if (floor != null && roof != null) return [floor - air * (roof - floor), roof + air * (roof - floor)];
  if (low == null || !isFinite(low)) return log ? [.1, 1] : [0, 1];
  if (reach) [low, top] = [Math.min(low, reach[0]), Math.max(top, reach[1])];
  const high = Math.max(low, Math.min(top, drawn.get(name)?.top ?? Infinity));
  low = Math.min(high, Math.max(low, drawn.get(name)?.bottom ?? -Infinity));
  if (floor != null) return [floor, (high || 1) * 1.08];
  const used = lanes(name).length * LANE + (own ? 16 : 6) + (high < top ? 18 : 0);
  const share = used / Math.max(80, u.bbox.height / ratioOf());
  if (log) {
    const spread = Math.max(Math.log10(high / low), .05);
    return [low / 10 ** (spread * .05), high * 10 ** (spread * share * 1.2)];
  }
  const spread = high - low || Math.abs(high) || 1;
  return [low - spread * .05, roof != null ? roof + spread * .05 : high + spread * share * 1.2];
};

// What lies under the pointer: the marks above the curves, or the nearest point of a chart with an axis of its own.
function tip(u, name) {
  const { left, top } = u.cursor, { marks, x: own, strips } = data[name];
  if (!marks && !own) return;
  const hovered = left != null && left >= 0 && u.root.matches(':hover');
  const near = !hovered ? [] : marks ? marksNear(u, left) : strips ? onStrip(u, strips[Math.floor(top / ROW)], left) : pointNear(u, left, top);
  const box = u.over.getBoundingClientRect();
  say(near.slice(0, 6).join('\n') + (near.length > 6 ? `\nand ${near.length - 6} more` : ''), box.left + left, box.top + top);
}
const counted = mark => mark[3] + (mark[4] > 1 ? ` (and ${mark[4] - 1} more)` : '');
const isNear = (u, at, left) => Math.abs(u.valToPos(at, 'x') - left) < 5;
const marksNear = (u, left) => data.shared.runs.flatMap(run => run.marks.filter(mark => isNear(u, mark[placeOf()], left))
  .map(mark => `${several() ? run.name + ', ' : ''}step ${whole(mark[0])}: ${counted(mark)}`));
function onStrip(u, strip, left) {
  if (!strip) return [];
  const found = strip.marks.filter(mark => isNear(u, mark[1], left)).map(counted), at = u.posToVal(left, 'x');
  const phase = strip.phases.findLast(([from, to]) => from <= at && at <= to);
  return [strip.name, ...found, ...(phase ? [`${data.phases[phase[2]]} until ${shown(phase[1], 3)} s; ${strip.spent[phase[2]]}`] : [])];
}
function pointNear(u, left, top) {
  let best = 24, found = [];
  u.series.forEach((one, index) => {
    if (!index || !one.show) return;
    const { x: places, values, tips } = one.source;
    places.forEach((place, at) => {
      const far = values[at] == null ? Infinity : Math.hypot(u.valToPos(place, 'x') - left, u.valToPos(values[at], 'y') - top);
      if (far < best) { best = far; found = [tips?.[at] || `${one.said}: ${shown(place)}, ${shown(values[at])}`]; }
    });
  });
  return found;
}

// --- drawing ---------------------------------------------------------------------------------------------------------

const shapeOf = name => `${ribbonHeight(name)} ${logOf(name)}`;
// With new values of the same curves a chart keeps its zoom, its cursor and the focus; it is made anew where a curve
// gets or loses its dots.
function refresh(name) {
  const before = drawn.get(name), made = before && columns(name);
  const labels = series => series.slice(1).map(one => `${one.label} ${one.dotted}`).join('\n');
  if (!made?.table || labels(before.plot.series) !== labels(made.series) || before.shape !== shapeOf(name)) { draw(name); return; }
  Object.assign(before, { top: made.top, bottom: made.bottom });
  made.series.forEach((one, index) => { before.plot.series[index].source = one.source; });
  before.plot.setData(made.table, !before.zoomed);
  if (before.zoomed) before.plot.redraw();
  describe(name);
}

function draw(name) {
  const holder = document.querySelector(`[data-chart="${name}"]`);
  const before = drawn.get(name);
  const kept = before?.zoomed ? { min: before.plot.scales.x.min, max: before.plot.scales.x.max } : null;
  const hidden = new Set(before ? before.plot.series.filter(one => !one.show).map(one => one.label) : []);
  const focused = before?.plot.over === document.activeElement;
  before?.plot.destroy();
  drawn.delete(name);
  const made = columns(name);
  holder.replaceChildren();
  const figure = holder.closest('figure');
  figure.classList.toggle('empty', !made.table);
  if ('optional' in figure.dataset) {
    figure.hidden = !made.table;
    if (data[name].title) figure.querySelector('h3').textContent = data[name].title;
  }
  if (!made.table) { holder.textContent = 'Nothing to show yet.'; holder.dataset.drawn = 'empty'; return; }
  for (const one of made.series) if (hidden.has(one.label)) one.show = false;
  const entry = { zoomed: false, top: made.top, bottom: made.bottom, shape: shapeOf(name) };
  drawn.set(name, entry);
  entry.plot = new uPlot(options(name, holder, made), made.table, holder);
  entry.plot.over.addEventListener('dblclick', () => { entry.zoomed = false; });
  if (kept) { entry.zoomed = true; entry.plot.setScale('x', kept); }
  reachable(entry.plot, holder, name);
  describe(name);
  if (focused) entry.plot.over.focus();
  holder.dataset.drawn = String(made.series.length - 1);
}

// What a chart shows, in words and numbers.
function describe(name) {
  const holder = document.querySelector(`[data-chart="${name}"]`), { plot } = drawn.get(name);
  const told = plot.series.slice(1).map((one, place) => {
    if (one.class === 'unlisted') return '';
    const same = plot.data.filter((values, index) => index && plot.series[index].group === one.group);
    const known = (data[name].grouped ? same.flat() : plot.data[place + 1]).filter(value => value != null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    const now = data[name].x ? '' : `now ${shown(known.at(-1))}, `;
    return known.length ? `${one.label} ${now}lowest ${shown(low)}, highest ${shown(high)}.` : '';
  });
  plot.over.setAttribute('aria-label', `${holder.getAttribute('aria-label')} ${told.join(' ')} Left and right arrow keys read the values, Escape shows everything again.`);
}

// The mark of an arm, in the colour of its lines.
function sample({ look, colour }) {
  const made = document.createElement('span');
  made.className = 'u-marker';
  made.innerHTML = `<svg aria-hidden="true" viewBox="-2 -2 4 4"><path d="${data.looks[look].shape}" fill="${colour}"></path></svg>`;
  return made;
}

// Curves are switched, and values read, with the keyboard too.
function reachable(plot, holder, name) {
  holder.querySelectorAll('.u-legend .u-series > th').forEach((head, row) => {
    const place = row + (data[name].grouped ? 1 : 0), one = plot.series[place];
    if (!place || one.class === 'unlisted') return;
    if (one.look != null) head.querySelector('.u-marker').replaceWith(sample(one));
    head.tabIndex = 0;
    head.setAttribute('role', 'button');
    const press = () => head.setAttribute('aria-pressed', String(one.show !== false));
    head.addEventListener('click', () => setTimeout(press));
    head.addEventListener('keydown', event => {
      if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); head.click(); }
    });
    press();
  });
  const over = plot.over;
  over.tabIndex = 0;
  over.setAttribute('role', 'application');
  over.addEventListener('keydown', event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === 'Escape') { wholeAgain(); return; }
    if (!step) return;
    event.preventDefault();
    const xs = plot.data[0], stride = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
    const at = plot.cursor.idx == null ? (step > 0 ? -1 : xs.length) : plot.cursor.idx;
    const next = Math.min(xs.length - 1, Math.max(0, at + step * stride));
    plot.setCursor({ left: plot.valToPos(xs[next], 'x'), top: over.clientHeight / 2 });
    const values = plot.series.slice(1).map((one, place) => [one.said, plot.data[place + 1][next]]).filter(pair => pair[1] != null);
    spoken.textContent = `${acrossLabel(name)} ${across(name, xs[next])}: ${values.map(([label, value]) => `${label} ${shown(value)}`).join(', ')}`;
  });
}

// What else is drawn with the charts.
const whenDrawn = [];
function drawAll() { NAMES.forEach(draw); whenDrawn.forEach(one => one()); }
function wholeAgain() { drawn.forEach(one => { one.zoomed = false; }); drawAll(); }

let resized, seen = innerWidth;
function begin() {
  const began = performance.now();
  drawAll();
  root.dataset.drawnIn = (performance.now() - began).toFixed(1);
  // What was folded had no width.
  document.querySelectorAll('details').forEach(fold => fold.addEventListener('toggle', () => { if (fold.open) fold.querySelectorAll('[data-chart]').forEach(holder => draw(holder.dataset.chart)); }));
  addEventListener('resize', () => {
    if (innerWidth === seen) return;
    seen = innerWidth;
    clearTimeout(resized);
    resized = setTimeout(drawAll, 120);
  });
}

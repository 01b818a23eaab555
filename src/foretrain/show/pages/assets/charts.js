// --- the shape of a chart --------------------------------------------------------------------------------------------

const NAMES = [...document.querySelectorAll('[data-chart]')].map(holder => holder.dataset.chart);
// Above the axis, where the heading does not say it.
const unitOf = name => ({ loss: 'loss', forecast: 'loss', speed: data.speed.runs[0].series[0]?.label })[name] || '';
const RUN_COLOURS = ['series-2', 'series-1', 'series-3', 'series-6', 'series-5', 'series-4', 'series-7', 'series-0'];
const OWN = { thin: 'series-2', bold: 'series-0', plain: 'series-2', dashed: 'series-1', edge: 'series-1', dots: 'series-4' };
const PHASES = ['warmup', 'full', 'correct', 'predict'];
const MARKS = { 'kept': 'good', 'shrunk': 'good', 'refused': 'muted', 'rolled back': 'bad', 'recovery': 'caution', 'resumed': 'ink', 'not finite': 'bad' };
const LANES = [['kept', 'shrunk'], ['refused', 'rolled back'], ['recovery', 'not finite', 'resumed']];
const RIBBON = 7, GAP = 3, LANE = 14, FONT = '12.5px system-ui, sans-serif';
const runColour = place => style(RUN_COLOURS[place % RUN_COLOURS.length]);
const colourOf = (kind, place) => several() ? runColour(place) : style(OWN[kind] || 'series-0');
const faded = (colour, share) => colour + Math.round(share * 255).toString(16).padStart(2, '0');
const ratioOf = () => devicePixelRatio || 1;

const drawn = new Map();
const axis = { x: 'step', cut: true, asked: false };
axis.log = data.loss.log;
const across = value => axis.x === 'time' ? duration(value) : whole(value);
const placeOf = () => axis.x === 'time' ? 1 : 0;
const logOf = name => name === 'loss' || name === 'forecast' ? axis.log : name === 'gradient' || data[name].log;

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
  const runs = data[name].runs, tables = [], series = [{}], bands = [], log = logOf(name);
  runs.forEach((run, place) => run.series.forEach(one => {
    const x = axis.x === 'time' ? one.seconds : one.steps;
    tables.push([x, log ? one.values.map(value => value > 0 ? value : null) : one.values]);
    const colour = colourOf(one.style, place);
    const few = one.values.length < 60;
    const lone = one.values.filter(value => value != null).length === 1; // no line goes through a single point
    const dotted = one.style === 'dots' || (one.style === 'bold' && few) || lone;
    const made = {
      label: several() ? `${run.name}: ${one.label}` : one.label,
      scale: 'y',
      stroke: one.style === 'thin' ? faded(colour, several() ? .55 : .8) : one.style === 'edge' ? faded(colour, .35) : colour,
      width: { bold: 2.5, thin: 1.2, dashed: 1.6, edge: .8, dots: 0 }[one.style] ?? 1.6,
      dash: one.style === 'dashed' ? [6, 4] : undefined,
      dotted,
      points: { show: dotted, size: one.style === 'dots' ? 3.5 : 6, fill: one.style === 'dots' ? faded(colour, .6) : style('surface'), stroke: colour },
      value: (u, value) => value == null ? '' : shown(value),
    };
    series.push(made);
    if (one.style === 'edge' && one.label.startsWith('upper')) bands.push({ series: [series.length - 1, series.length - 2], fill: faded(colour, .12) });
  }));
  // Runs and curves have places of their own: where one has no entry its line goes on, where its value is missing
  // (mode 2) the line is cut up to its next value.
  const table = tables.length ? uPlot.join(tables, tables.map(() => [0, 2])) : null;
  const [bottom, top] = bounds(name, log);
  return { table, series, bands, bottom, top };
}

// --- ribbon, marks, units --------------------------------------------------------------------------------------------

// The phase ribbon of every run lies under the plot; marks of moves and recoveries stand in lanes above the curves.
const ribbonHeight = () => data.shared.prediction === 'tried' ? data.shared.runs.length * (RIBBON + GAP) + 4 : 0;
function lanes() {
  if (several()) return data.shared.runs.map((run, row) => [run, null, runColour(row)]);
  const [run] = data.shared.runs, kinds = new Set(run.marks.map(mark => mark[2]));
  return LANES.filter(lane => lane.some(kind => kinds.has(kind))).map(lane => [run, lane, null]);
}

function paint(u, name) {
  const ctx = u.ctx, ratio = ratioOf(), place = placeOf(), { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.setLineDash([]);
  if (ribbonHeight()) data.shared.runs.forEach((run, row) => {
    const y = top + height + (4 + row * (RIBBON + GAP)) * ratio;
    const stretches = run.phases.slice(0, -1).map((phase, index) => [phase[place], run.phases[index + 1][place], phase[2], phase[3]]);
    stretches.sort((a, b) => PHASES.indexOf(a[2]) - PHASES.indexOf(b[2]));
    for (const [from, to, phase, share] of stretches) {
      const start = Math.max(left, u.valToPos(from, 'x', true)), end = Math.min(left + width, u.valToPos(to, 'x', true));
      if (end < left || start > left + width) continue;
      // Of phases too short to be seen one by one the height is their share.
      const wide = Math.max(end - start, 2 * ratio), high = share === 1 ? RIBBON : Math.max(2.5, RIBBON * share);
      ctx.fillStyle = style('phase-full');
      if (share !== 1) ctx.fillRect(start, y, wide, RIBBON * ratio);
      ctx.fillStyle = style(`phase-${phase}`);
      ctx.fillRect(start, y + (RIBBON - high) * ratio, wide, high * ratio);
    }
  });
  if (name === 'loss') lanes().forEach(([run, kinds, colour], row) => {
    const last = new Map();
    for (const mark of run.marks) {
      const x = u.valToPos(mark[place], 'x', true);
      if (x < left || x > left + width || (kinds && !kinds.includes(mark[2]))) continue;
      if (x - (last.get(mark[2]) ?? -Infinity) < 9 * ratio) continue;  // one stands for those that it would cover
      last.set(mark[2], x);
      shape(ctx, mark[2], x, top + (8 + row * LANE) * ratio, ratio, colour);
    }
  });
  units(u, name, ctx, ratio);
  beyond(u, name, ctx, ratio);
  ctx.restore();
}

function units(u, name, ctx, ratio) {
  const { left, top, height } = u.bbox;
  ctx.font = FONT.replace(/^[\d.]+/, size => size * ratio);
  ctx.fillStyle = style('muted');
  ctx.textBaseline = 'alphabetic';
  ctx.textAlign = 'left';
  ctx.fillText(unitOf(name), left, top - 7 * ratio);
  ctx.textAlign = 'right';
  ctx.textBaseline = 'top';
  ctx.fillText(axis.x, left - 12 * ratio, top + height + (ribbonHeight() + 4) * ratio);
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
  const y = top + ((name === 'loss' ? lanes().length * LANE : 0) + 12) * ratio;
  ctx.fillStyle = style('bad');
  ctx.strokeStyle = style('surface');
  ctx.textBaseline = 'middle';
  for (const { x, value } of found) {
    const right = x > left + width - 100 * ratio, text = right ? `up to ${shown(value, 3)} ↑` : `↑ up to ${shown(value, 3)}`;
    ctx.textAlign = right ? 'right' : 'left';
    ctx.lineWidth = 5 * ratio;
    ctx.strokeText(text, x + (right ? 4 : -4) * ratio, y);
    ctx.fillText(text, x + (right ? 4 : -4) * ratio, y);
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
  const room = Math.max(2, u.bbox.height / ratioOf() / 34), every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / room));
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
  const grid = { stroke: style('grid'), width: 1 }, ink = style('muted'), ribbon = ribbonHeight(), log = logOf(name);
  const side = { stroke: ink, grid, ticks: { show: false }, font: FONT, size: 62, values: (u, ticks) => ticks.map(tick => tick == null ? '' : shown(tick)) };
  const axes = [
    { stroke: ink, grid, ticks: { show: false }, font: FONT, gap: ribbon + 4, size: 34 + ribbon, values: (u, ticks) => ticks.map(across), space: 70 },
    { ...side, ...(log ? { splits: powers, filter: (u, ticks) => ticks } : {}) },
  ];
  const everything = (u, low, high) => {
    const xs = u.data[0], ends = data.shared.runs.map(run => run.phases.at(-1)[placeOf()]);
    return low === xs[0] && high === xs.at(-1) ? [0, Math.max(...ends, high)] : [low, high];
  };
  const scales = { x: { time: false, range: everything }, y: { distr: log ? 3 : 1, range: range(name, log) } };
  made.series[0] = { label: axis.x, value: (u, value) => value == null ? '' : across(value) };
  return {
    width: Math.max(260, holder.clientWidth), height: +holder.dataset.height || 300, padding: [unitOf(name) ? 24 : 10, null, null, null],
    scales, axes, series: made.series, bands: made.bands,
    cursor: { sync: { key: 'x', setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
    legend: { live: true },
    hooks: {
      draw: [u => paint(u, name)],
      setSelect: [u => { if (u.select.width > 2) drawn.get(name).zoomed = true; }],
      setCursor: [u => tip(u, name)],
    },
  };
}

// The values in view, with room for the marks above the curve, up to the height above which they are cut off.
const range = (name, log) => (u, low, top) => {
  if (name === 'confidence') return [0, 1];
  if (low == null || !isFinite(low)) return log ? [.1, 1] : [0, 1];
  const high = Math.max(low, Math.min(top, drawn.get(name)?.top ?? Infinity));
  low = Math.min(high, Math.max(low, drawn.get(name)?.bottom ?? -Infinity));
  if (name === 'speed' || name === 'rate') return [0, (high || 1) * 1.08];
  const used = (name === 'loss' ? lanes().length * LANE + 6 : 6) + (high < top ? 18 : 0);
  const share = used / Math.max(80, u.bbox.height / ratioOf());
  if (log) {
    const spread = Math.max(Math.log10(high / low), .05);
    return [low / 10 ** (spread * .05), high * 10 ** (spread * share * 1.2)];
  }
  const spread = high - low || Math.abs(high) || 1;
  return [low - spread * .05, high + spread * share * 1.2];
};

function tip(u, name) {
  if (name !== 'loss') return;
  const { left, top } = u.cursor, near = [];
  if (left != null && left >= 0 && u.root.matches(':hover'))
    for (const run of data.shared.runs) for (const mark of run.marks)
      if (Math.abs(u.valToPos(mark[placeOf()], 'x') - left) < 5)
        near.push(`${several() ? run.name + ', ' : ''}step ${whole(mark[0])}: ${mark[3]}${mark[4] > 1 ? ` (and ${mark[4] - 1} more)` : ''}`);
  const box = u.over.getBoundingClientRect();
  say(near.slice(0, 6).join('\n') + (near.length > 6 ? `\nand ${near.length - 6} more` : ''), box.left + left, box.top + top);
}

// --- drawing ---------------------------------------------------------------------------------------------------------

const shapeOf = name => `${ribbonHeight()} ${logOf(name)}`;
// With new values of the same curves a chart keeps its zoom, its cursor and the focus; it is made anew where a curve
// gets or loses its dots.
function refresh(name) {
  const before = drawn.get(name), made = before && columns(name);
  const labels = series => series.slice(1).map(one => `${one.label} ${one.dotted}`).join('\n');
  if (!made?.table || labels(before.plot.series) !== labels(made.series) || before.shape !== shapeOf(name)) { draw(name); return; }
  Object.assign(before, { top: made.top, bottom: made.bottom });
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
    figure.querySelector('h3').textContent = data[name].runs.flatMap(run => run.series)[0]?.label || '';
  }
  if (!made.table) { holder.textContent = 'Nothing to show yet.'; holder.dataset.drawn = 'empty'; return; }
  for (const one of made.series) if (hidden.has(one.label)) one.show = false;
  const entry = { zoomed: false, top: made.top, bottom: made.bottom, shape: shapeOf(name) };
  drawn.set(name, entry);
  entry.plot = new uPlot(options(name, holder, made), made.table, holder);
  entry.plot.over.addEventListener('dblclick', () => { entry.zoomed = false; });
  if (kept) { entry.zoomed = true; entry.plot.setScale('x', kept); }
  reachable(entry.plot, holder);
  describe(name);
  if (focused) entry.plot.over.focus();
  holder.dataset.drawn = String(made.series.length - 1);
}

// What a chart shows, in words and numbers.
function describe(name) {
  const holder = document.querySelector(`[data-chart="${name}"]`), { plot } = drawn.get(name);
  const told = plot.series.slice(1).map((one, place) => {
    const known = plot.data[place + 1].filter(value => value != null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    return known.length ? `${one.label} now ${shown(known.at(-1))}, lowest ${shown(low)}, highest ${shown(high)}.` : '';
  });
  plot.over.setAttribute('aria-label', `${holder.getAttribute('aria-label')} ${told.join(' ')} Left and right arrow keys read the values, Escape shows everything again.`);
}

// Curves are switched, and values read, with the keyboard too.
function reachable(plot, holder) {
  holder.querySelectorAll('.u-legend .u-series > th').forEach((head, place) => {
    if (!place) return;
    head.tabIndex = 0;
    head.setAttribute('role', 'button');
    const press = () => head.setAttribute('aria-pressed', String(plot.series[place].show !== false));
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
    const values = plot.series.slice(1).map((one, place) => [one.label, plot.data[place + 1][next]]).filter(pair => pair[1] != null);
    spoken.textContent = `${axis.x} ${across(xs[next])}: ${values.map(([label, value]) => `${label} ${shown(value)}`).join(', ')}`;
  });
}

function wholeAgain() { drawn.forEach(one => { one.zoomed = false; }); NAMES.forEach(draw); cuts(); }

const choose = document.querySelector('#loss .choices');
choices(choose, [['step', 'over steps'], ['time', 'over time']], 'step', value => { axis.x = value; wholeAgain(); });
choices(choose, [[false, 'linear'], [true, 'logarithmic']], axis.log, value => { axis.log = value; axis.asked = true; wholeAgain(); });
choices(choose, [[true, 'without spikes'], [false, 'with spikes']], true, value => { axis.cut = value; wholeAgain(); });
// Offered only where something is cut off.
function cuts() { choose.lastChild.hidden = axis.cut && ![...drawn].some(([name, one]) => name !== 'forecast' && one.top < Infinity); }
// Of a run that goes on the loss may come to span more, or less: the axis follows until the reader has chosen one.
function followSpan() {
  if (axis.asked || axis.log === data.loss.log) return;
  axis.log = !axis.log;
  pressed(choose.children[1], choose.children[1].children[+axis.log]);
  ['loss', 'forecast'].forEach(draw);
}

// Nothing is said of prediction where it is off; where nothing was tried it is folded. What was folded has no width.
const fold = document.querySelector('details.fold'), predictionLink = document.querySelector('nav a[href="#prediction"]').parentElement;
let known = data.shared.prediction;
function foldPrediction() {
  const state = data.shared.prediction;
  document.getElementById('prediction').hidden = predictionLink.hidden = state === 'off';
  if (state !== known) fold.open = state === 'tried';
  known = state;
}
fold.addEventListener('toggle', () => { if (fold.open) fold.querySelectorAll('[data-chart]').forEach(holder => draw(holder.dataset.chart)); });


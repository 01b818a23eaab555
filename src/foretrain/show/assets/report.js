// Draws the charts of a report from the data in the page, and keeps the page up to date where it is served live.
// Nothing is loaded from elsewhere. Text comes as markup that the server has escaped; data is drawn, never evaluated.
'use strict';
(() => {
  const root = document.documentElement;
  const style = name => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  let data = JSON.parse(document.getElementById('data').textContent);
  const axis = { x: 'step', log: wide() };
  // A loss that spans more than a factor of 50, or that jumped once, is better seen on a logarithmic axis.
  function wide() {
    const values = data.loss.runs.flatMap(run => run.series.flatMap(one => one.values)).filter(value => value != null);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return low > 0 && high / low > 50;
  }
  const drawn = new Map();

  // --- theme ---------------------------------------------------------------------------------------------------------

  const prefersDark = matchMedia('(prefers-color-scheme: dark)');
  const dark = () => (root.dataset.theme || (prefersDark.matches ? 'dark' : 'light')) === 'dark';
  const themeButton = document.createElement('button');
  const nameTheme = () => { themeButton.textContent = dark() ? 'Light theme' : 'Dark theme'; };
  if (['#dark', '#light'].includes(location.hash)) root.dataset.theme = location.hash.slice(1);
  themeButton.type = 'button';
  themeButton.onclick = () => { root.dataset.theme = dark() ? 'light' : 'dark'; nameTheme(); drawAll(); };
  nameTheme();
  document.querySelector('.top').append(themeButton);
  prefersDark.addEventListener('change', () => { nameTheme(); drawAll(); });
  addEventListener('beforeprint', () => { root.dataset.printing = root.dataset.theme || ''; root.dataset.theme = 'light'; drawAll(); });
  addEventListener('afterprint', () => { root.dataset.theme = root.dataset.printing; delete root.dataset.printing; drawAll(); });

  // --- numbers as text -----------------------------------------------------------------------------------------------

  const minus = text => text.replace(/^-/, '−');
  const shown = value => {
    if (value == null) return '–';
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return minus(value.toExponential(2).replace(/\.?0*e\+?/, 'e'));
    return minus(size >= 1000 ? Math.round(value).toLocaleString('en') : String(+value.toPrecision(5)));
  };
  const duration = seconds => {
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600);
    if (seconds < 10 && seconds !== whole) return seconds.toFixed(1) + ' s';
    if (hours) return `${hours}h${String(Math.floor(whole % 3600 / 60)).padStart(2, '0')}m`;
    return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, '0')}`;
  };
  const across = value => axis.x === 'time' ? duration(value) : Math.round(value).toLocaleString('en');

  // --- the shape of a chart ------------------------------------------------------------------------------------------

  const several = () => data.shared.runs.length > 1;
  const RUN_COLOURS = ['series-2', 'series-1', 'series-3', 'series-6', 'series-5', 'series-4', 'series-7', 'series-0'];
  const runColour = place => style(RUN_COLOURS[place % RUN_COLOURS.length]);
  const OWN = { thin: 'series-2', bold: 'series-0', plain: 'series-2', dashed: 'series-1', edge: 'series-1', dots: 'series-4' };
  const colourOf = (kind, place) => several() ? runColour(place) : style(OWN[kind] || 'series-0');
  const faded = (colour, share) => colour + Math.round(share * 255).toString(16).padStart(2, '0');
  const PHASES = ['warmup', 'full', 'correct', 'predict'];
  const RIBBON = 7, GAP = 3;
  const MARKS = { 'kept': 'good', 'shrunk': 'good', 'refused': 'muted', 'rolled back': 'bad', 'recovery': 'caution', 'resumed': 'ink', 'not finite': 'bad' };

  function columns(name) {
    const runs = data[name].runs, tables = [], series = [{}], bands = [];
    runs.forEach((run, place) => run.series.forEach(one => {
      const x = axis.x === 'time' ? one.seconds : one.steps;
      const log = logOf(name);
      tables.push([x, log && one.scale !== 'rate' ? one.values.map(value => value > 0 ? value : null) : one.values]);
      const colour = colourOf(one.style, place);
      const few = one.values.length < 60;
      const made = {
        label: several() ? `${run.name}: ${one.label}` : one.label,
        scale: one.scale || 'y',
        stroke: one.style === 'thin' ? faded(colour, several() ? .55 : .8) : one.style === 'edge' ? faded(colour, .35) : colour,
        width: { bold: 2.5, thin: 1.2, dashed: 1.6, edge: .8, dots: 0 }[one.style] ?? 1.6,
        dash: one.style === 'dashed' ? [6, 4] : undefined,
        points: { show: one.style === 'dots' || (one.style === 'bold' && few), size: one.style === 'dots' ? 3.5 : 6, fill: one.style === 'dots' ? faded(colour, .6) : style('surface'), stroke: colour },
        value: (u, value) => shown(value),
      };
      series.push(made);
      if (one.style === 'edge' && one.label.startsWith('upper')) bands.push({ series: [series.length - 1, series.length - 2], fill: faded(colour, .12) });
    }));
    // Runs and curves have places of their own: where one has no entry its line goes on, where its value is missing
    // (mode 2) the line is cut up to its next value.
    return { table: tables.length ? uPlot.join(tables, tables.map(() => [0, 2])) : null, series, bands };
  }

  const logOf = name => name === 'loss' || name === 'forecast' ? axis.log : name === 'gradient';

  // The phase ribbon of every run lies under the plot; marks of moves and recoveries stand above it.
  const laneHeight = () => data.shared.runs.length * (RIBBON + GAP) + 4;

  function paint(u, withMarks) {
    const ctx = u.ctx, ratio = devicePixelRatio || 1, place = axis.x === 'time' ? 1 : 0;
    const { left, top, width, height } = u.bbox;
    ctx.save();
    data.shared.runs.forEach((run, row) => {
      const y = top + height + (4 + row * (RIBBON + GAP)) * ratio;
      const stretches = run.phases.slice(0, -1).map((phase, index) => [phase[place], run.phases[index + 1][place], phase[2]]);
      stretches.sort((a, b) => PHASES.indexOf(a[2]) - PHASES.indexOf(b[2]));
      for (const [from, to, phase] of stretches) {
        const start = Math.max(left, u.valToPos(from, 'x', true)), end = Math.min(left + width, u.valToPos(to, 'x', true));
        if (end < left || start > left + width) continue;
        ctx.fillStyle = style(`phase-${phase}`);
        ctx.fillRect(start, y, Math.max(end - start, 2 * ratio), RIBBON * ratio);
      }
    });
    if (withMarks) data.shared.runs.forEach((run, row) => {
      for (const mark of run.marks) {
        const x = u.valToPos(mark[place], 'x', true);
        if (x < left || x > left + width) continue;
        shape(ctx, mark[2], x, top + (9 + row * 15) * ratio, ratio, several() ? runColour(row) : null);
      }
    });
    ctx.restore();
  }

  function shape(ctx, kind, x, y, ratio, colour) {
    const s = 4.2 * ratio;
    ctx.strokeStyle = ctx.fillStyle = colour || style(MARKS[kind] || 'muted');
    ctx.lineWidth = 1.6 * ratio;
    ctx.setLineDash([]);
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

  function options(name, holder, made) {
    const grid = { stroke: style('grid'), width: 1 }, ink = style('muted');
    const font = '12.5px system-ui, sans-serif';
    const lane = laneHeight(), log = logOf(name);
    const side = { stroke: ink, grid, ticks: { show: false }, font, size: 62, values: (u, ticks) => ticks.map(tick => tick == null ? '' : shown(tick)) };
    // On a logarithmic axis powers of ten have lines; where there are fewer than two of them, every value has.
    const powers = ticks => ticks.filter(tick => tick > 0 && Number.isInteger(+Math.log10(tick).toFixed(9)));
    const grids = log ? { ...grid, filter: (u, ticks) => powers(ticks).length < 2 ? ticks : ticks.map(tick => powers([tick]).length ? tick : null) } : grid;
    const axes = [
      { stroke: ink, grid, ticks: { show: false }, font, gap: lane + 4, size: 34 + lane, values: (u, ticks) => ticks.map(across), space: 70 },
      { ...side, grid: grids },
    ];
    const everything = (u, low, high) => {
      const xs = u.data[0], ends = data.shared.runs.map(run => run.phases.at(-1)[axis.x === 'time' ? 1 : 0]);
      return low === xs[0] && high === xs.at(-1) ? [0, Math.max(...ends, high)] : [low, high];
    };
    const scales = { x: { time: false, range: everything }, y: { distr: log ? 3 : 1 } };
    if (name === 'loss' || name === 'forecast') scales.y.range = rangeWithRoom(name, log);
    if (name === 'confidence') scales.y.range = [0, 1];
    if (name === 'speed') scales.y.range = (u, low, high) => [0, (high || 1) * 1.08];
    if (made.series.some(one => one.scale === 'rate')) {
      scales.rate = { range: (u, low, high) => [0, (high || 1) * 1.08] };
      axes.push({ ...side, scale: 'rate', side: 1, grid: { show: false } });
    }
    made.series[0] = { label: axis.x === 'time' ? 'time' : 'step', value: (u, value) => value == null ? '–' : across(value) };
    return {
      width: Math.max(260, holder.clientWidth), height: +holder.dataset.height || 300,
      scales, axes, series: made.series, bands: made.bands,
      cursor: { sync: { key: 'x', setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
      legend: { live: true },
      hooks: {
        draw: [u => paint(u, name === 'loss')],
        setSelect: [u => { if (u.select.width > 2) drawn.get(name).zoomed = true; }],
        setCursor: [u => tip(u, name)],
      },
    };
  }

  // Room for the marks above the curve; one wild value does not flatten all others: then it leaves the frame.
  const rangeWithRoom = (name, log) => (u, low, high) => {
    if (low == null || !isFinite(low)) return log ? [.1, 1] : [0, 1];
    const marks = name === 'loss' ? data.shared.runs.length * 15 + 10 : 6;
    const share = marks / Math.max(80, u.bbox.height / (devicePixelRatio || 1));
    if (log) {
      const spread = Math.max(Math.log10(high / low), .05);
      return [low / 10 ** (spread * .05), high * 10 ** (spread * share * 1.4)];
    }
    const spread = high - low || Math.abs(high) || 1;
    return [low - spread * .05, high + spread * share * 1.4];
  };

  // --- what lies under the pointer -----------------------------------------------------------------------------------

  const bubble = document.createElement('div');
  bubble.className = 'bubble';
  bubble.hidden = true;
  document.body.append(bubble);
  function tip(u, name) {
    const { left, top } = u.cursor;
    if (name !== 'loss' || left == null || left < 0 || !u.root.matches(':hover')) { if (name === 'loss') bubble.hidden = true; return; }
    const place = axis.x === 'time' ? 1 : 0, near = [];
    for (const run of data.shared.runs) for (const mark of run.marks)
      if (Math.abs(u.valToPos(mark[place], 'x') - left) < 5)
        near.push(`${several() ? run.name + ', ' : ''}step ${mark[0].toLocaleString('en')}: ${mark[3]}${mark[4] > 1 ? ` (and ${mark[4] - 1} more)` : ''}`);
    bubble.hidden = !near.length;
    if (!near.length) return;
    bubble.textContent = near.slice(0, 6).join('\n') + (near.length > 6 ? `\nand ${near.length - 6} more` : '');
    const box = u.over.getBoundingClientRect();
    bubble.style.left = `${Math.min(box.left + left + 14, innerWidth - bubble.offsetWidth - 8) + scrollX}px`;
    bubble.style.top = `${box.top + top + 16 + scrollY}px`;
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  // With new values of the same curves a chart keeps its zoom, its cursor and the focus.
  function refresh(name) {
    const before = drawn.get(name), made = before && columns(name);
    const same = made && made.table && before.plot.series.slice(1).map(one => one.label).join('\n') === made.series.slice(1).map(one => one.label).join('\n');
    if (!same) { draw(name); return; }
    before.plot.setData(made.table, !before.zoomed);
    if (before.zoomed) before.plot.redraw();
  }

  function draw(name) {
    const holder = document.querySelector(`[data-chart="${name}"]`);
    if (!holder || !data[name]) return;
    const before = drawn.get(name);
    const kept = before?.zoomed ? { min: before.plot.scales.x.min, max: before.plot.scales.x.max } : null;
    const hidden = new Set(before ? before.plot.series.filter(one => !one.show).map(one => one.label) : []);
    before?.plot.destroy();
    drawn.delete(name);
    const made = columns(name);
    holder.replaceChildren();
    holder.closest('figure').classList.toggle('empty', !made.table);
    if (!made.table) { holder.textContent = 'Nothing to show yet.'; holder.dataset.drawn = 'empty'; return; }
    for (const one of made.series) if (hidden.has(one.label)) one.show = false;
    const entry = { zoomed: false };
    drawn.set(name, entry);
    entry.plot = new uPlot(options(name, holder, made), made.table, holder);
    entry.plot.over.addEventListener('dblclick', () => { entry.zoomed = false; });
    if (kept) { entry.zoomed = true; entry.plot.setScale('x', kept); }
    reachable(entry.plot, holder);
    holder.dataset.drawn = String(made.series.length - 1);
  }

  // Curves are switched, and values read, with the keyboard too.
  function reachable(plot, holder) {
    holder.querySelectorAll('.u-legend .u-series > th').forEach((head, place) => {
      if (!place) return;
      head.tabIndex = 0;
      head.setAttribute('role', 'button');
      const say = () => head.setAttribute('aria-pressed', String(plot.series[place].show !== false));
      head.addEventListener('click', () => setTimeout(say));
      head.addEventListener('keydown', event => {
        if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); head.click(); }
      });
      say();
    });
    const over = plot.over;
    over.tabIndex = 0;
    over.setAttribute('role', 'application');
    over.setAttribute('aria-label', `${holder.getAttribute('aria-label')} Left and right arrow keys read the values, Escape shows everything again.`);
    over.addEventListener('keydown', event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === 'Escape') { drawn.forEach(one => { one.zoomed = false; }); drawAll(); return; }
      if (!step) return;
      event.preventDefault();
      const xs = plot.data[0], stride = event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1;
      const at = plot.cursor.idx == null ? (step > 0 ? -1 : xs.length) : plot.cursor.idx;
      const next = Math.min(xs.length - 1, Math.max(0, at + step * stride));
      plot.setCursor({ left: plot.valToPos(xs[next], 'x'), top: over.clientHeight / 2 });
    });
  }

  function heatMaps() {
    const holder = document.querySelector('[data-heat]');
    const section = document.getElementById('health');
    const maps = data.heat || [];
    section.hidden = !maps.length;
    document.querySelector('nav a[href="#health"]').parentElement.hidden = !maps.length;
    holder.replaceChildren();
    for (const map of maps) {
      if (several()) { const name = document.createElement('h3'); name.textContent = map.name; holder.append(name); }
      const canvas = document.createElement('canvas');
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', `Gradient norm of ${map.layers.length} layers at ${map.steps.length} looks, from dark (small) to bright (large)`);
      holder.append(canvas);
      heat(canvas, map);
    }
    holder.dataset.drawn = String(maps.length);
  }

  const SHADES = [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]];
  const shade = share => {
    const at = Math.min(.9999, Math.max(0, share)) * (SHADES.length - 1), low = Math.floor(at);
    return `rgb(${SHADES[low].map((part, index) => Math.round(part + (SHADES[low + 1][index] - part) * (at - low))).join()})`;
  };

  function heat(canvas, map) {
    const ratio = devicePixelRatio || 1, width = Math.max(260, canvas.parentElement.clientWidth);
    const names = width > 600 ? 190 : 90, row = Math.max(5, Math.min(18, 420 / map.layers.length)), top = 8, foot = 44;
    const height = top + row * map.layers.length + foot;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    const ctx = canvas.getContext('2d');
    ctx.scale(ratio, ratio);
    const logs = map.values.flat().filter(value => value > 0).map(Math.log10);
    const low = Math.min(...logs, 0), high = Math.max(...logs, low + 1);
    const cell = (width - names - 12) / map.steps.length;
    ctx.font = '11.5px system-ui, sans-serif';
    ctx.textBaseline = 'middle';
    const every = Math.max(1, Math.ceil(13 / row));
    map.values.forEach((values, place) => {
      const y = top + place * row;
      values.forEach((value, column) => {
        ctx.fillStyle = value == null ? style('grid') : shade(value > 0 ? (Math.log10(value) - low) / (high - low) : 0);
        ctx.fillRect(names + column * cell, y, Math.ceil(cell), Math.ceil(row) - (row > 8 ? 1 : 0));
      });
      if (place % every) return;
      ctx.fillStyle = style('muted');
      ctx.textAlign = 'right';
      const most = width > 600 ? 29 : 13, label = map.layers[place];
      ctx.fillText(label.length > most ? '…' + label.slice(1 - most) : label, names - 8, y + row / 2);
    });
    const y = top + row * map.layers.length;
    ctx.fillStyle = style('muted');
    const ticks = Math.max(1, Math.ceil(map.steps.length / Math.max(2, Math.floor((width - names) / 90))));
    ctx.textAlign = 'center';
    map.steps.forEach((step, column) => { if (column % ticks === 0) ctx.fillText(step.toLocaleString('en'), names + (column + .5) * cell, y + 12); });
    const bar = Math.min(200, width - names - 130), x = names + 40;
    for (let place = 0; place < bar; place++) { ctx.fillStyle = shade(place / bar); ctx.fillRect(x + place, y + 26, 1.5, 9); }
    ctx.fillStyle = style('muted');
    ctx.textAlign = 'right'; ctx.fillText(shown(10 ** low), x - 6, y + 31);
    ctx.textAlign = 'left'; ctx.fillText(`${shown(10 ** high)}  gradient norm`, x + bar + 6, y + 31);
  }

  const NAMES = ['loss', 'forecast', 'confidence', 'gradient', 'speed'];
  function drawAll() { NAMES.forEach(draw); heatMaps(); }

  // --- choices -------------------------------------------------------------------------------------------------------

  function choices(holder, listed, chosen, use) {
    const group = document.createElement('div');
    group.className = 'choose';
    group.setAttribute('role', 'group');
    group.setAttribute('aria-label', holder.dataset.label);
    for (const [value, text] of listed) {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = text;
      button.setAttribute('aria-pressed', String(value === chosen));
      button.onclick = () => {
        for (const other of group.children) other.setAttribute('aria-pressed', String(other === button));
        use(value);
        drawn.forEach(one => { one.zoomed = false; });
        drawAll();
      };
      group.append(button);
    }
    holder.append(group);
  }
  const choose = document.querySelector('.choices');
  choices(choose, [['step', 'over steps'], ['time', 'over time']], 'step', value => { axis.x = value; });
  choices(choose, [[false, 'linear'], [true, 'logarithmic']], axis.log, value => { axis.log = value; });

  document.addEventListener('click', event => {
    const button = event.target.closest('button[data-show]');
    if (button) filter(button.closest('[data-section]'), button.dataset.show);
  });
  function filter(section, kind) {
    section.dataset.show = kind;
    for (const button of section.querySelectorAll('button[data-show]')) button.setAttribute('aria-pressed', String(button.dataset.show === kind));
  }

  let resized;
  let width = innerWidth;
  addEventListener('resize', () => { if (innerWidth === width) return; width = innerWidth; clearTimeout(resized); resized = setTimeout(drawAll, 120); });

  const began = performance.now();
  drawAll();
  root.dataset.drawnIn = (performance.now() - began).toFixed(1);

  // --- live ----------------------------------------------------------------------------------------------------------

  if (root.dataset.live === undefined) return;
  const status = document.getElementById('status');
  const waiting = new Map();
  const say = text => { if (status.textContent !== text) status.textContent = text; };

  function put(name, markup) {
    const section = document.querySelector(`[data-section="${name}"]`);
    const selection = getSelection();
    const selecting = selection && !selection.isCollapsed && section.contains(selection.anchorNode);
    if (selecting || (section.contains(document.activeElement) && name !== 'lead')) { waiting.set(name, markup); return; }
    waiting.delete(name);
    const places = [...section.querySelectorAll('.scroll')].map(one => [one.scrollTop, one.scrollTop + one.clientHeight >= one.scrollHeight - 4]);
    const open = [...section.querySelectorAll('details')].map(one => one.open);
    section.innerHTML = markup;
    section.querySelectorAll('details').forEach((one, place) => { one.open = open[place] || false; });
    section.querySelectorAll('.scroll').forEach((one, place) => {
      if (places[place]) one.scrollTop = places[place][1] ? one.scrollHeight : places[place][0];
    });
    if (section.dataset.show) filter(section, section.dataset.show);
  }
  addEventListener('focusout', () => setTimeout(() => waiting.forEach((markup, name) => put(name, markup))));

  function connect() {
    const source = new EventSource('/events');
    source.onopen = () => say('Live');
    source.onmessage = event => {
      const message = JSON.parse(event.data);
      for (const [name, markup] of Object.entries(message.sections)) put(name, markup);
      if (Object.keys(message.charts).length) {
        data = { ...data, ...message.charts };
        const all = 'shared' in message.charts;
        NAMES.filter(name => all || name in message.charts).forEach(refresh);
        if ('heat' in message.charts) heatMaps();
      }
      if (message.title) document.title = message.title;
      root.dataset.updates = String(1 + Number(root.dataset.updates || 0));
      say('Live');
    };
    source.onerror = () => {
      say('Not connected: is foretrain watch still running? Trying again.');
      if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(connect, 3000); }
    };
  }
  connect();
})();

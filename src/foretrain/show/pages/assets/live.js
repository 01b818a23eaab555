// --- live ------------------------------------------------------------------------------------------------------------

const status = document.getElementById('status');
const tell = text => { if (status.textContent !== text) status.textContent = text; };
const waiting = new Map();

// A section that is being used is replaced when it is left.
function put(name, markup) {
  const section = document.querySelector(`[data-section="${name}"]`);
  if (selecting(section) || (section.contains(document.activeElement) && name !== 'lead')) { waiting.set(name, markup); return; }
  waiting.delete(name);
  const places = [...section.querySelectorAll('.scroll')].map(one => one.scrollTop);
  const open = [...section.querySelectorAll('details')].map(one => one.open);
  section.innerHTML = markup;
  section.querySelectorAll('details').forEach((one, place) => { one.open = open[place] || false; });
  section.querySelectorAll('.scroll').forEach((one, place) => { one.scrollTop = places[place] || 0; });
}
const selecting = part => { const chosen = getSelection(); return chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode); };

// Drawn once per frame at the most, and not at all while nobody sees it; what came meanwhile is drawn together.
const stale = new Set();
let asked = false;
function catchUp() {
  asked = false;
  const start = performance.now();
  const names = new Set(stale);
  NAMES.filter(name => names.has(name) || names.has('shared')).forEach(refresh);
  followSpan();
  foldPrediction();
  cuts();
  if (names.has('heat')) heatMaps();
  if (names.has('ledger') && !selecting(body)) { showLedger(); stale.delete('ledger'); }
  for (const name of names) if (name !== 'ledger') stale.delete(name);
  root.dataset.updateTook = (performance.now() - start).toFixed(1);
  root.dataset.drawnUpdates = String(1 + Number(root.dataset.drawnUpdates || 0));
}
function changed(names) {
  names.forEach(name => stale.add(name.startsWith('rows/') ? 'ledger' : name));
  if (stale.size && !asked && !document.hidden) { asked = true; requestAnimationFrame(catchUp); }
}

function take(event) {
  const message = JSON.parse(event.data);
  for (const [name, markup] of Object.entries(message.sections)) put(name, markup);
  data = { ...data, ...message.charts };
  changed(Object.keys(message.charts));
  document.title = message.title;
  root.dataset.updates = String(1 + Number(root.dataset.updates || 0));
  tell('Live');
}

function connect() {
  const source = new EventSource('/events');
  source.onopen = () => tell('Live');
  source.onmessage = take;
  source.onerror = () => {
    tell('Not connected: is foretrain watch still running? Trying again.');
    if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(connect, 3000); }
  };
}

if (root.dataset.live !== undefined) {
  addEventListener('focusout', () => setTimeout(() => waiting.forEach((markup, name) => put(name, markup))));
  document.addEventListener('visibilitychange', () => changed([]));
  connect();
}

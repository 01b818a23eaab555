// A page draws its charts from the data in it, and keeps itself up to date where it is served live. Nothing is loaded
// from elsewhere. Text comes as markup that the server has escaped; data is drawn, never evaluated.

const root = document.documentElement;
let data = JSON.parse(document.getElementById('data').textContent);
const several = () => data.shared.runs.length > 1;

// --- theme -----------------------------------------------------------------------------------------------------------

const colours = new Map();
const style = name => {
  if (!colours.has(name)) {
    const [light, night] = getComputedStyle(root).getPropertyValue(`--${name}`).match(/#[0-9a-f]+/gi);
    colours.set(name, dark() ? night : light);
  }
  return colours.get(name);
};
const prefersDark = matchMedia('(prefers-color-scheme: dark)');
const dark = () => (root.dataset.theme || (prefersDark.matches ? 'dark' : 'light')) === 'dark';
const themeButton = document.createElement('button');
const nameTheme = () => { themeButton.textContent = dark() ? 'Light theme' : 'Dark theme'; };
function repaint() { colours.clear(); nameTheme(); drawAll(); }
if (['#dark', '#light'].includes(location.hash)) root.dataset.theme = location.hash.slice(1);
themeButton.type = 'button';
themeButton.onclick = () => { root.dataset.theme = dark() ? 'light' : 'dark'; repaint(); };
nameTheme();
document.querySelector('.top').append(themeButton);
prefersDark.addEventListener('change', repaint);
addEventListener('beforeprint', () => { root.dataset.printing = root.dataset.theme || ''; root.dataset.theme = 'light'; repaint(); });
addEventListener('afterprint', () => {
  if (root.dataset.printing) root.dataset.theme = root.dataset.printing; else delete root.dataset.theme;
  delete root.dataset.printing;
  repaint();
});

// --- numbers as text -------------------------------------------------------------------------------------------------

const minus = text => text.replace(/^-/, '−');
const whole = value => Math.round(value).toLocaleString('en');
const shown = (value, digits = 5) => {
  if (value == null) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return minus(value.toExponential(Math.min(2, digits - 1)).replace(/(\.\d*?)0*e\+?/, '$1e').replace('.e', 'e'));
  return minus(size >= 1000 ? whole(value) : String(+value.toPrecision(digits)));
};
const duration = seconds => {
  const rounded = Math.round(seconds), hours = Math.floor(rounded / 3600);
  if (seconds < 10 && seconds !== rounded) return seconds.toFixed(1) + ' s';
  if (hours) return `${hours}h${String(Math.floor(rounded % 3600 / 60)).padStart(2, '0')}m`;
  return `${Math.floor(rounded / 60)}:${String(rounded % 60).padStart(2, '0')}`;
};

// --- choices and tips ------------------------------------------------------------------------------------------------

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
    button.onclick = () => { pressed(group, button); use(value); };
    group.append(button);
  }
  holder.append(group);
}
const pressed = (group, button) => { for (const other of group.children) other.setAttribute('aria-pressed', String(other === button)); };

const bubble = document.createElement('div');
bubble.className = 'bubble';
bubble.hidden = true;
document.body.append(bubble);
function say(text, x, y) {
  bubble.hidden = !text;
  if (!text) return;
  bubble.textContent = text;
  bubble.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - bubble.offsetWidth - 8)) + scrollX}px`;
  bubble.style.top = `${y + 16 + scrollY}px`;
}

// What the arrow keys read in a chart is said here, for those who cannot see it.
const spoken = document.createElement('div');
spoken.className = 'unseen';
spoken.setAttribute('role', 'status');
document.body.append(spoken);


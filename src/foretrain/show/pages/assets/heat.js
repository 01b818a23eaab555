// --- layers ----------------------------------------------------------------------------------------------------------

const SHADES = [[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]];
const shade = share => {
  const at = Math.min(.9999, Math.max(0, share)) * (SHADES.length - 1), low = Math.floor(at);
  return `rgb(${SHADES[low].map((part, index) => Math.round(part + (SHADES[low + 1][index] - part) * (at - low))).join()})`;
};
let measured = '';

function heatMaps() {
  const holder = document.querySelector('[data-heat]'), section = document.getElementById('health');
  const maps = data.heat, offered = [...new Set(maps.flatMap(map => Object.keys(map.measures)))];
  section.hidden = !maps.length;
  document.querySelector('nav a[href="#health"]').parentElement.hidden = !maps.length;
  const group = section.querySelector('.choices');
  if (group.dataset.offered !== offered.join()) {
    group.dataset.offered = offered.join();
    group.replaceChildren();
    if (!offered.includes(measured)) measured = offered[0];
    if (offered.length > 1) choices(group, offered.map(name => [name, name]), measured, value => { measured = value; heatMaps(); });
  }
  holder.replaceChildren();
  for (const map of maps) {
    if (several()) { const name = document.createElement('h3'); name.textContent = map.name; holder.append(name); }
    const canvas = document.createElement('canvas');
    holder.append(canvas);
    if (map.measures[measured]) heat(canvas, map, map.measures[measured]);
  }
  holder.dataset.drawn = String(maps.length);
}

function heat(canvas, map, table) {
  const ratio = ratioOf(), width = Math.max(260, canvas.parentElement.clientWidth), ctx = canvas.getContext('2d');
  const font = '12px system-ui, sans-serif', most = width > 600 ? 30 : 16;
  const names = map.layers.map(name => name.length > most ? '…' + name.slice(1 - most) : name);
  ctx.font = font;
  const left = Math.ceil(Math.max(...names.map(name => ctx.measureText(name).width), 30)) + 10;
  const row = Math.max(5, Math.min(20, 480 / names.length)), top = 6, foot = 62, bottom = top + row * names.length;
  canvas.width = width * ratio; canvas.height = (bottom + foot) * ratio;
  canvas.style.width = `${width}px`; canvas.style.height = `${bottom + foot}px`;
  ctx.scale(ratio, ratio);
  ctx.font = font;
  ctx.textBaseline = 'middle';
  const known = table.flat().filter(value => value > 0).sort((a, b) => a - b);
  // A hundredth of the values at either end share the last colour, so that a single one does not take them all.
  const part = share => known.length ? Math.log10(known[Math.round((known.length - 1) * share)]) : 0;
  const low = part(.01), high = Math.max(part(.99), low + .3), cell = (width - left - 4) / map.steps.length;
  const colour = value => value == null ? style('grid') : shade(value > 0 ? (Math.log10(value) - low) / (high - low) : 0);
  const every = Math.ceil(13 / row);
  table.forEach((values, place) => {
    const y = top + place * row;
    values.forEach((value, column) => {
      ctx.fillStyle = colour(value);
      ctx.fillRect(left + column * cell, y, cell + .5, row - (row > 8 ? 1 : 0));
    });
    if (place % every) return;
    ctx.fillStyle = style('muted');
    ctx.textAlign = 'right';
    ctx.fillText(names[place], left - 7, y + row / 2);
  });
  ctx.fillStyle = style('muted');
  ctx.textAlign = 'right';
  ctx.fillText('step', left - 7, bottom + 12);
  const spread = Math.max(1, Math.ceil(map.steps.length / Math.max(2, Math.floor((width - left) / 80))));
  ctx.textAlign = 'left';
  map.steps.forEach((step, column) => {
    if (column % spread === 0 && left + column * cell < width - 40) ctx.fillText(whole(step), left + column * cell, bottom + 12);
  });
  legend(ctx, left, bottom + 34, Math.min(260, width - left - 80), low, high, known, width > 600);
  const words = `${measured} of ${map.layers.length} layers at ${map.steps.length} looks, from step ${whole(map.steps[0])} to ${whole(map.steps.at(-1))}`;
  canvas.setAttribute('role', 'img');
  canvas.setAttribute('aria-label', `${words}: between ${shown(known[0] ?? 0, 3)} and ${shown(known.at(-1) ?? 0, 3)}. The table below has the numbers.`);
  canvas.onmousemove = event => {
    const column = Math.floor((event.offsetX - left) / cell), line = Math.floor((event.offsetY - top) / row);
    const value = table[line]?.[column];
    const inside = column >= 0 && column < map.steps.length && line >= 0 && line < table.length;
    say(inside ? `${map.layers[line]}, step ${whole(map.steps[column])}\n${measured} ${value == null ? 'not known' : shown(value, 3)}` : '', event.clientX, event.clientY);
  };
  canvas.onmouseleave = () => say('');
}

// The colours with their values; beside them what is not known.
function legend(ctx, x, y, bar, low, high, known, wide) {
  for (let place = 0; place < bar; place++) { ctx.fillStyle = shade(place / bar); ctx.fillRect(x + place, y - 5, 1.5, 10); }
  ctx.fillStyle = style('muted');
  ctx.textAlign = 'left';
  if (wide) ctx.fillText(measured, x + bar + 12, y);
  const cut = [known[0] < 10 ** low ? '≤ ' : '', known.at(-1) > 10 ** high ? '≥ ' : ''];
  [[0, 'left', cut[0]], [.5, 'center', ''], [1, 'right', cut[1]]].forEach(([share, side, sign]) => {
    ctx.textAlign = side;
    ctx.fillText(sign + shown(10 ** (low + share * (high - low)), 2), x + share * bar, y + 16);
  });
}

whenDrawn.push(heatMaps);

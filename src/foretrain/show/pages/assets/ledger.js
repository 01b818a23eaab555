// --- decisions -------------------------------------------------------------------------------------------------------

const book = document.getElementById('ledger'), body = book.querySelector('tbody'), box = book.querySelector('.scroll');
const view = { show: 'all', order: data.ledger.order, most: data.ledger.shown };
const more = document.createElement('button'), all = document.createElement('button');
more.type = all.type = 'button';
more.onclick = () => { view.most += data.ledger.shown; showLedger(); };
all.onclick = () => { view.most = Infinity; showLedger(); };
book.querySelector('.more').append(more, all);

function rowsOf(kind) {
  const rows = [], { rows: count, shown: size } = data.ledger;
  for (let start = 0; start < count; start += size)
    for (const row of data[`rows/${start / size}`]) if (kind === 'all' || row[0] === kind) rows.push(row);
  return rows;
}

const escaped = text => text.replace(/[&<>"]/g, sign => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' })[sign]);
function markup([, mark, ...cells]) {
  const icon = mark ? `<i class="${escaped(mark)}" aria-hidden="true"></i>` : '';
  return `<tr>${Object.values(data.ledger.columns).map((style, place) => `<td class="${style}">${style === 'decision' ? icon : ''}${escaped(cells[place])}</td>`).join('')}</tr>`;
}

// What is new at the top does not push away what is being read.
function showLedger() {
  const rows = rowsOf(view.show), some = view.order === 'first' ? rows.slice(0, view.most) : rows.slice(-view.most).reverse();
  const below = box.scrollHeight - box.scrollTop, reading = view.order === 'last' && box.scrollTop > 4;
  const columns = Object.entries(data.ledger.columns), head = book.querySelector('thead tr');
  if (head.children.length !== columns.length) head.innerHTML = columns.map(([name, style]) => `<th scope="col" class="${style}">${name}</th>`).join('');
  book.querySelector('.controls').hidden = data.ledger.rows < 6 && view.show === 'all';
  body.innerHTML = some.map(markup).join('') || '<tr><td colspan="9">No such decision was made yet.</td></tr>';
  if (reading) box.scrollTop = box.scrollHeight - below;
  const left = rows.length - some.length, words = { all: 'decisions', move: 'moves', phase: 'changes of phase', recovery: 'recoveries and notes' };
  const rest = data.ledger.left ? ` ${whole(data.ledger.left)} changes of phase and kept moves more are in metrics.jsonl.` : '';
  const text = `${whole(some.length)} of ${whole(rows.length)} ${words[view.show]}.${rest}`;
  const told = book.querySelector('[data-count]');
  if (told.textContent !== text) told.textContent = text;
  more.hidden = all.hidden = !left;
  more.textContent = `Show ${Math.min(left, data.ledger.shown)} more`;
  all.textContent = `Show all ${whole(rows.length)}`;
}

book.addEventListener('click', event => {
  const button = event.target.closest('button[data-show], button[data-order]');
  if (!button) return;
  pressed(button.parentElement, button);
  Object.assign(view, button.dataset, { most: data.ledger.shown });
  box.scrollTop = 0;
  showLedger();
});

showLedger();

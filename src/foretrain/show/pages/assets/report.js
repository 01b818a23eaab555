// --- what only a report has: its axes, and prediction folded away ---------------------------------------------------

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

// Nothing is said of prediction where it is off; where nothing was tried it is folded.
const fold = document.querySelector('details.fold'), predictionLink = document.querySelector('nav a[href="#prediction"]').parentElement;
let known = data.shared.prediction;
function foldPrediction() {
  const state = data.shared.prediction;
  document.getElementById('prediction').hidden = predictionLink.hidden = state === 'off';
  if (state !== known) fold.open = state === 'tried';
  known = state;
}
whenDrawn.push(cuts);

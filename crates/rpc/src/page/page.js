// The page: its views, what is read for each of them, and the keys.

import { ApiError, call, events, getIfPresent, metrics, operations, setToken } from './api.js';
import { askText, closeDialog, errorMessage, openDialog } from './forms.js';
import { duration, el, printable } from './dom.js';
import { History } from './history.js';
import { VIEWS } from './views.js';

const INTERVAL_MS = 2_000;
const EVENTS_KEPT = 500;
/** Time between two drawings of events. */
const EVENTS_INTERVAL_MS = 250;

/** What all views share. */
const state = {
  history: new History(),
  events: [],
  eventsLive: false,
  operations: [],
  process: null,
  /** Rows of the last answers by key; `null` if the process has no such part. */
  rows: {},
  refresh: () => update(),
};

const main = document.getElementById('main');
const stateLine = document.getElementById('state');
let view = null;
let timer = null;
let eventsTimer;
let isUpdating = false;
let isAsking = false;

function chosenView() {
  const name = location.hash.slice(1).split('/')[0];
  return VIEWS.find(one => one.name === name) ?? VIEWS[0];
}

function showView() {
  const chosen = chosenView();
  for (const link of document.querySelectorAll('#views a')) {
    if (link.dataset.view === chosen.name) link.setAttribute('aria-current', 'page'); else link.removeAttribute('aria-current');
  }
  document.title = `${chosen.title} – tenmil`;
  view = chosen.make(state);
  main.replaceChildren(view.element);
  view.draw();
  update();
}

/** Reads what the view needs, and draws it. One update runs at a time. */
async function update() {
  if (isUpdating) return;
  isUpdating = true;
  clearTimeout(timer);
  const current = view;
  try {
    if (!state.operations.length) state.operations = markCreates(await operations());
    const [process, samples] = await Promise.all([call('GET', 'v1/process'), metrics()]);
    state.process = process;
    state.history.add(samples, Date.now());
    const wanted = current.reads ?? [];
    const answers = await Promise.all(wanted.map(async read => {
      const { key, name, parameters } = typeof read === 'string' ? { key: read, name: read } : read;
      const isKnown = state.operations.some(one => one.method === 'GET' && one.path === `/v1/${name}`);
      return [key, isKnown ? await getIfPresent(name, parameters) : null];
    }));
    for (const [key, rows] of answers) state.rows[key] = rows;
    document.getElementById('process').textContent =
      printable(`${process.version}, process ${process.pid}, up ${duration((process.uptime_ns ?? 0) / 1e9)}`);
    stateLine.textContent = state.eventsLive ? 'live' : 'live, without events';
    stateLine.className = 'good';
    current.draw();
  } catch (error) {
    stateLine.textContent = error instanceof ApiError ? printable(`error: ${error.message}`) : 'no connection to the process';
    stateLine.className = 'bad';
    if (error.status === 401) askForToken();
  } finally {
    isUpdating = false;
    timer = setTimeout(update, document.hidden ? 5 * INTERVAL_MS : INTERVAL_MS);
  }
  if (current !== view) update();
}

/** POST to a list creates an element of it: its path is that of a list that is read, or of elements that are deleted. */
function markCreates(all) {
  for (const one of all.filter(one => one.method === 'POST')) {
    one.isCreate = all.some(other => other.method === 'DELETE' && other.segments[0] === one.segments[0]);
  }
  return all;
}

function askForToken() {
  if (isAsking) return;
  isAsking = true;
  askText('This process requires a token', 'Token', 'password', token => { setToken(token); isAsking = false; update(); });
}

document.getElementById('dialog').addEventListener('close', () => { isAsking = false; });

const KEYS = [
  ...VIEWS.map((one, index) => [String(index + 1), one.title, () => { location.hash = one.name; }]),
  ['r', 'Read again', update],
  ['t', 'Light, dark, or as the system', changeTheme],
  ['/', 'Go to the filter of the view', () => main.querySelector('input[type="search"]')?.focus()],
  ['?', 'Show the keys', showKeys],
];

function showKeys() {
  const rows = [...KEYS, ['Esc', 'Close a dialog', null], ['← →', 'Move the cursor of a chart that has the focus', null]];
  openDialog('Keys', el('table', {}, el('tbody', {}, rows.map(([key, text]) => el('tr', {}, el('td', {}, el('kbd', {}, key)), el('td', {}, text))))),
    el('div', { class: 'toolbar' }, el('button', { type: 'button', onclick: closeDialog }, 'Close')));
}

function changeTheme() {
  const order = [undefined, 'dark', 'light'];
  const root = document.documentElement;
  const next = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
  if (next) { root.dataset.theme = next; localStorage.setItem('tenmil-theme', next); } else { delete root.dataset.theme; localStorage.removeItem('tenmil-theme'); }
}

document.addEventListener('keydown', event => {
  const isTyping = event.target.closest?.('input, select, textarea, dialog');
  if (isTyping || event.ctrlKey || event.altKey || event.metaKey) return;
  const found = KEYS.find(([key]) => key === event.key);
  if (!found) return;
  event.preventDefault();
  found[2]();
});

/** Draws the view if it shows events, at most once in each interval, however many events come. */
function drawEventsSoon() {
  eventsTimer ??= setTimeout(() => {
    eventsTimer = undefined;
    if (view?.drawsEvents) view.draw();
  }, EVENTS_INTERVAL_MS);
}

function start() {
  const theme = localStorage.getItem('tenmil-theme');
  if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  document.getElementById('theme').addEventListener('click', changeTheme);
  document.getElementById('help').addEventListener('click', showKeys);
  document.getElementById('views').append(...VIEWS.map((one, index) =>
    el('a', { href: `#${one.name}`, 'data-view': one.name, title: `key ${index + 1}` }, one.title)));
  window.addEventListener('hashchange', showView);
  document.addEventListener('visibilitychange', () => { if (!document.hidden) update(); });
  events(event => {
    state.events.unshift(event);
    state.events.length = Math.min(state.events.length, EVENTS_KEPT);
    drawEventsSoon();
  }, isLive => { state.eventsLive = isLive; }, new AbortController().signal);
  try {
    showView();
  } catch (error) {
    main.replaceChildren(errorMessage(error));
  }
}

start();

// The views. Each has an element, `reads` (methods that it shows, and their keys in `state.rows`), and `draw`.

import { Chart } from './chart.js';
import { bytes, duration, el, field, replace, short, title } from './dom.js';
import { dataTable, openOperation, operationForm, verb } from './forms.js';

const SHARES = [0.5, 0.99, 0.999];
const PERCENTILES = ['p50', 'p99', 'p99.9'];
const ALL = () => true;

/** Charts of I/O, of what `matches` accepts. */
function ioCharts() {
  const operations = new Chart('Operations per second', ['read', 'write'], short);
  const bandwidth = new Chart('Bytes per second', ['read', 'write'], value => bytes(Math.round(value)), { isBytes: true });
  const reads = new Chart('Read latency', PERCENTILES, duration);
  const writes = new Chart('Write latency', PERCENTILES, duration);
  return {
    element: el('div', { class: 'charts' }, [operations, bandwidth, reads, writes].map(one => one.element)),
    draw(history, matches) {
      operations.setPoints(history.rates('count', matches));
      bandwidth.setPoints(history.rates('bytes', matches));
      reads.setPoints(history.percentiles('read', SHARES, matches));
      writes.setPoints(history.percentiles('write', SHARES, matches));
    },
  };
}

function card(heading, value, note, tone) {
  return el('div', { class: 'card' }, el('h3', {}, heading), el('div', { class: `value ${tone ?? ''}` }, value), note ? el('div', { class: 'dim' }, note) : null);
}

/** A bar of a share between 0 and 1. */
function bar(share, label) {
  const percent = Math.round(Math.min(Math.max(share, 0), 1) * 100);
  const inner = el('div', { class: share > 0.98 ? 'bad' : share > 0.9 ? 'warn' : null });
  inner.style.width = `${percent}%`;
  return el('div', { class: 'bar', role: 'meter', 'aria-valuenow': percent, 'aria-valuemin': 0, 'aria-valuemax': 100, 'aria-label': label }, inner);
}

function section(heading, ...content) {
  return [el('h2', {}, heading), ...content];
}

/** Operation with this method and path, if the process has it. */
function find(state, method, name) {
  return state.operations.find(one => one.method === method && one.name === name);
}

function button(state, operation, text, given, key, tone, present) {
  return operation && el('button', { type: 'button', class: tone, 'data-key': key, onclick: () => openOperation(operation, given, state.refresh, present) }, text);
}

const SINGULAR = name => name.replace(/ies$/, 'y').replace(/s$/, '');

/** Method that limits the elements of a list, and its parameters for a row. */
const LIMIT_OF = {
  subsystems: ['subsystem_limits', row => ({ subsystem: row.nqn })],
  namespaces: ['namespace_limits', row => ({ subsystem: row.subsystem, namespace: row.nsid })],
  exports: ['export_limits', row => ({ name: row.name })],
};

/** Buttons of a row of the list `name`: what can be done with one of its elements. */
function rowActions(state, name) {
  const changes = state.operations.filter(one => one.segments[0] === name && one.segments.length > 1 && one.method !== 'GET');
  const set = find(state, 'POST', SINGULAR(name));
  if (!changes.length && !set) return undefined;
  const [limit, givenOf] = LIMIT_OF[name] ?? [];
  const limitButton = row => limit && button(state, find(state, 'POST', limit), 'Limit', givenOf(row), `limit-${name}-${Object.values(givenOf(row)).join('/')}`);
  return row => [limitButton(row), limit ? ' ' : null, ...[...changes, set].filter(Boolean).map(operation => {
    const keys = operation.parameters.filter(one => one.in === 'path' || one.required);
    // A row that stands for several objects, as for all other hosts, has no key.
    if (keys.some(one => one.in === 'path' && (row[one.name] === null || row[one.name] === undefined))) return null;
    const given = Object.fromEntries(keysOf(operation, row).map(one => [one, row[one]]));
    const key = `${operation.method}-${name}-${Object.values(given).join('/')}`;
    const text = verb(operation) === 'Apply' ? 'Change' : verb(operation);
    return [button(state, operation, text, given, key, operation.method === 'DELETE' ? 'danger' : null, row), ' '];
  })];
}

/** Buttons of a row of limits: the operation depends on what is limited. */
function limitActions(state) {
  return row => {
    const name = { subsystem: 'subsystem_limits', namespace: 'namespace_limits', host: 'host_limits', 'each-host': 'host_limits', export: 'export_limits' }[row.of];
    const given = row.of === 'export' ? { name: row.export } : { subsystem: row.export };
    if (row.of === 'namespace') given.namespace = row.namespace;
    if (row.of === 'host') given.host = row.host;
    return [button(state, find(state, 'POST', name), 'Limit', given, `limit-${row.of}-${Object.values(given).join('/')}`, null, row)];
  };
}

/** Names of the parameters that select the object of a row: those of the path, required ones, and its name. */
function keysOf(operation, row) {
  const isKey = one => one.in === 'path' || one.required || ['name', 'device', 'pool'].includes(one.name);
  return operation.parameters.filter(one => isKey(one) && ['string', 'number'].includes(typeof row[one.name])).map(one => one.name);
}

/** Columns that identify a row come first; JSON objects have no order. */
const FIRST = ['subsystem', 'nqn', 'host', 'name', 'id', 'nsid', 'address', 'device', 'path', 'uri'];

function columnsOf(row) {
  const rank = name => { const at = FIRST.indexOf(name); return at < 0 ? FIRST.length : at; };
  return Object.keys(row).sort((one, other) => rank(one) - rank(other));
}

/** Tables of lists with what can be done to their elements. `columns` limits the columns. */
function listSection(state, name, heading, columns, options = {}) {
  const rows = state.rows[name];
  if (rows === null || rows === undefined) return null;
  const create = state.operations.find(one => one.isCreate && one.name === name);
  const names = (columns ?? columnsOf(rows[0] ?? {})).filter(column => !rows.length || rows.some(row => row[column] !== undefined));
  return [
    el('h2', {}, `${heading} (${rows.length})`),
    create ? el('div', { class: 'toolbar' }, button(state, create, `Create ${title(SINGULAR(name))}`, {}, `create-${name}`, 'primary')) : null,
    dataTable(names, rows, { id: name, actions: rowActions(state, name), ...options }),
  ].filter(Boolean);
}

function overview(state) {
  const live = el('div');
  const charts = ioCharts();
  const below = el('div');
  return {
    element: el('div', {}, live, el('h2', {}, 'I/O of all exports'), charts.element, below),
    reads: ['pools', 'mirrors', 'paths'],
    drawsEvents: true,
    draw() {
      const { history } = state;
      const point = history.points.at(-1);
      const total = part => point ? point.rows.reduce((sum, row) => sum + row[part], 0) : NaN;
      const exports = new Set((history.points.at(-1)?.rows ?? []).map(row => `${row.protocol} ${row.export}`));
      const hosts = new Set(history.series('tenmil_connections').filter(([labels, value]) => labels.host && value > 0).map(([labels]) => labels.host));
      const problems = healthProblems(state);
      replace(live, el('div', { class: 'cards' },
        card('Health', problems.length ? `${problems.length} problem${problems.length > 1 ? 's' : ''}` : 'good', null, problems.length ? 'bad' : 'good'),
        card('Exports', exports.size, 'subsystems, NBD exports, devices'),
        card('Hosts', hosts.size, `${short(history.sum('tenmil_connections'))} connections`),
        card('Operations', `${short(total('count'))}/s`),
        card('Bandwidth', `${bytes(Math.round(total('bytes')))}/s`),
        card('Failed', `${short(total('failed'))}/s`, null, total('failed') > 0 ? 'bad' : null),
        card('Memory', bytes(history.sum('process_resident_memory_bytes')), 'resident')),
        problems.length ? el('div', { class: 'message bad', role: 'alert' }, problems.map(one => el('div', {}, one))) : null);
      charts.draw(history, ALL);
      replace(below, section('Capacity', capacity(state)), section('Latest events', eventTable(state.events.slice(0, 8))));
    },
  };
}

function healthProblems(state) {
  const problems = [];
  for (const pool of state.rows.pools ?? []) {
    if (pool.health !== 'healthy') problems.push(`pool ${pool.name || pool.uri}: ${pool.health}: ${pool.stopped_because ?? ''}`);
    if (pool.free_bytes < 0.02 * pool.size_bytes) problems.push(`pool ${pool.name || pool.uri} is full`);
  }
  for (const mirror of state.rows.mirrors ?? []) if (mirror.health !== 'healthy') problems.push(`mirror ${mirror.device}: ${mirror.health}`);
  for (const path of state.rows.paths ?? []) if (path.state !== 'up') problems.push(`path ${path.address} to ${path.device}: ${path.state}${path.why ? `: ${path.why}` : ''}`);
  return problems;
}

function capacity(state) {
  const pools = state.rows.pools ?? [];
  if (!pools.length) return el('p', { class: 'dim' }, 'No pools are open in this process.');
  return el('div', { class: 'cards' }, pools.map(pool => {
    const share = pool.used_bytes / Math.max(pool.size_bytes, 1);
    return el('div', { class: 'card' }, el('h3', {}, pool.name || pool.uri), bar(share, `used part of ${pool.name || pool.uri}`),
      el('div', { class: 'dim' }, `${bytes(pool.used_bytes)} of ${bytes(pool.size_bytes)}, ${pool.volumes} volumes`));
  }));
}

function io(state) {
  const charts = ioCharts();
  const choice = el('select', { id: 'io-export', onchange: () => draw() });
  const by = el('select', { id: 'io-by', onchange: () => draw() }, ['namespace', 'host', 'export'].map(one => el('option', {}, one)));
  const live = el('div');
  const draw = () => {
    const point = state.history.points.at(-1);
    const rows = point?.rows ?? [];
    const names = [...new Set(rows.map(row => row.export))].sort();
    const offered = [...choice.options].slice(1).map(one => one.value);
    if (offered.join('\n') !== names.join('\n')) {
      const chosen = choice.value;
      choice.replaceChildren(el('option', { value: '' }, 'all exports'), ...names.map(name => el('option', { value: name }, name)));
      choice.value = names.includes(chosen) ? chosen : '';
    }
    const matches = row => choice.value === '' || row.export === choice.value;
    charts.draw(state.history, matches);
    replace(live, dataTable(['protocol', 'export', by.value === 'export' ? 'all' : by.value, 'r/s', 'rkB/s', 'r_await_ms', 'w/s', 'wkB/s', 'w_await_ms', 'f/s', 'aqu-sz', 'err/s', 'limited/s', 'limit_wait_ms'].filter(one => one !== 'all'),
      iostatRows(rows.filter(matches), (point?.limits ?? []).filter(matches), by.value), { id: 'io', cell: (name, row) => typeof row[name] === 'number' ? row[name].toFixed(/await|wait_ms/.test(name) ? 3 : name === 'aqu-sz' ? 2 : 0) : undefined }));
  };
  return {
    element: el('div', {}, el('div', { class: 'toolbar' }, el('label', {}, 'Export ', choice), el('label', {}, 'One line for each ', by)), charts.element, el('h2', {}, 'Since the last reading'), live),
    draw,
  };
}

/** Rates as `tenmil iostat` shows them. */
function iostatRows(rows, limits, by) {
  const sums = new Map();
  const partOf = row => by === 'export' ? '' : row[by] || '–';
  const keyOf = row => JSON.stringify([row.protocol, row.export, partOf(row)]);
  for (const row of rows) {
    const [part, key] = [partOf(row), keyOf(row)];
    const sum = sums.get(key) ?? { protocol: row.protocol, export: row.export, [by]: by === 'export' ? row.export : part, 'r/s': 0, 'rkB/s': 0, r_time: 0, 'w/s': 0, 'wkB/s': 0, w_time: 0, 'f/s': 0, 'aqu-sz': 0, 'err/s': 0, 'limited/s': 0, limit_time: 0 };
    const prefix = { read: 'r', write: 'w', flush: 'f' }[row.operation];
    if (prefix) {
      sum[`${prefix}/s`] += row.count;
      sum['aqu-sz'] += row.time;
      if (prefix !== 'f') {
        sum[`${prefix}kB/s`] += row.bytes / 1024;
        sum[`${prefix}_time`] += row.time;
      }
    }
    sum['err/s'] += row.failed;
    sums.set(key, sum);
  }
  for (const row of limits) {
    const sum = sums.get(keyOf(row));
    if (!sum) continue;
    sum['limited/s'] += row.limited;
    sum.limit_time += row.wait;
  }
  return [...sums.values()].map(sum => ({ ...sum, r_await_ms: sum['r/s'] > 0 ? 1e3 * sum.r_time / sum['r/s'] : 0, w_await_ms: sum['w/s'] > 0 ? 1e3 * sum.w_time / sum['w/s'] : 0, limit_wait_ms: sum['limited/s'] > 0 ? 1e3 * sum.limit_time / sum['limited/s'] : 0 }));
}

/** Objects of the configuration, NBD exports and connections. */
function exportsView(state) {
  const live = el('div');
  const lists = [
    ['subsystems', 'Subsystems'], ['namespaces', 'Namespaces'], ['hosts', 'Hosts'], ['listeners', 'Listeners'],
    ['exports', 'NBD exports'], ['limits', 'Limits', ['of', 'export', 'namespace', 'host', 'iops', 'read_iops', 'write_iops', 'bytes', 'read_bytes', 'write_bytes', 'burst_ms']],
    ['nvme_connections', 'NVMe/TCP connections', ['id', 'peer', 'host', 'subsystem', 'controller', 'queue', 'cipher_suite', 'authentication', 'reactor']],
    ['connections', 'NBD connections', ['id', 'export', 'peer', 'phase', 'in_flight', 'reads', 'writes', 'errors']],
  ];
  return {
    element: live,
    reads: lists.map(([name]) => name),
    draw() {
      const found = lists.map(([name, heading, columns]) => listSection(state, name, heading, columns, name === 'limits' ? { actions: limitActions(state) } : {})).filter(Boolean).flat();
      replace(live, found.length ? found : el('p', { class: 'dim' }, 'This process serves neither NVMe/TCP nor NBD.'));
    },
  };
}

/** Pools, and the tree of their volumes, snapshots and clones. */
function volumes(state) {
  const live = el('div');
  const view = {
    element: live,
    reads: ['pools', 'jobs'],
    draw() {
      const pools = state.rows.pools ?? [];
      const key = pool => `volumes of ${pool.uri}`;
      view.reads = ['pools', 'jobs', ...pools.map(pool => ({ key: key(pool), name: 'volumes', parameters: { pool: pool.uri } }))];
      replace(live, pools.length ? [
        section('Pools', capacity(state)),
        pools.map(pool => section(`Volumes and snapshots of ${pool.name || pool.uri}`,
          el('div', { class: 'toolbar' }, button(state, find(state, 'POST', 'volume_create'), 'Create volume', { pool: pool.uri }, `create-volume-${pool.uri}`, 'primary')),
          volumeTree(state, pool, state.rows[key(pool)] ?? []))),
        section('Jobs', dataTable(Object.keys(state.rows.jobs?.[0] ?? {}), state.rows.jobs ?? [], { id: 'jobs' })),
      ] : el('p', { class: 'dim' }, 'No pools are open in this process.'));
    },
  };
  return view;
}

function volumeTree(state, pool, rows) {
  const children = new Map();
  const names = new Set(rows.map(row => row.name));
  for (const row of rows) {
    const origin = names.has(row.origin) ? row.origin : null;
    children.set(origin, [...children.get(origin) ?? [], row]);
  }
  // A clone chain may be long, so this is a loop.
  const ordered = [];
  const waiting = (children.get(null) ?? []).map(row => [row, 1]).reverse();
  while (waiting.length) {
    const [row, level] = waiting.pop();
    ordered.push([row, level]);
    waiting.push(...(children.get(row.name) ?? []).map(child => [child, level + 1]).reverse());
  }
  const action = (name, text, given, tone) => [button(state, find(state, 'POST', name), text, { pool: pool.uri, ...given }, `${name}-${given.name ?? given.volume ?? given.from}`, tone), ' '];
  const actions = row => [
    row.read_only ? null : action('volume_snapshot', 'Snapshot', { volume: row.name }),
    action('volume_clone', 'Clone', { from: row.name }),
    row.read_only ? null : action('volume_resize', 'Resize', { name: row.name, size_bytes: row.size_bytes }),
    row.read_only && row.origin ? action('volume_rollback', 'Roll back', { volume: row.origin, snapshot: row.name }) : null,
    action('volume_rename', 'Rename', { name: row.name }),
    action('volume_delete', 'Delete', { name: row.name }, 'danger'),
  ];
  if (!ordered.length) return el('p', { class: 'dim' }, 'None.');
  return el('div', { class: 'scroll' }, el('table', { role: 'treegrid', 'aria-label': 'Volumes and snapshots' },
    el('thead', {}, el('tr', {}, ['Name', 'Kind', 'Size', 'Used', 'Unique', 'Shared', 'Open', 'Actions'].map(name => el('th', { scope: 'col' }, name)))),
    el('tbody', {}, ordered.map(([row, level]) => {
      const name = el('td', {}, level > 1 ? '└ ' : '', row.name);
      name.style.paddingLeft = `${0.6 + 1.1 * (level - 1)}rem`;
      return el('tr', { 'aria-level': level, 'data-volume': row.name }, name, el('td', {}, row.read_only ? 'snapshot' : row.origin ? 'clone' : 'volume'),
        ['size_bytes', 'used_bytes', 'unique_bytes', 'shared_bytes'].map(part => el('td', { class: 'number' }, field(part, row[part]))),
        el('td', { class: 'number' }, field('users', row.users)), el('td', { class: 'actions' }, actions(row)));
    }))));
}

function reactors(state) {
  const chart = new Chart('Busy', [], value => `${Math.round(value)} %`, { max: 100 });
  const live = el('div');
  return {
    element: el('div', {}, el('div', { class: 'charts' }, chart.element), live),
    reads: ['reactors', 'threads'],
    draw() {
      const ids = [...new Set((state.history.points.at(-1)?.reactors ?? []).map(one => one.id))].sort((a, b) => a - b);
      chart.setSeries(ids.map(id => `reactor ${id}`));
      chart.setPoints(state.history.busy(ids));
      const set = (name, text) => button(state, find(state, 'POST', name), text, {}, `set-${name}`);
      replace(live, el('div', { class: 'toolbar' }, set('poll', 'Poll mode'), set('scheduler', 'Scheduler')),
        ...[listSection(state, 'reactors', 'Reactors', ['id', 'core', 'mode', 'sleeping', 'threads', 'busy_percent', 'iterations', 'sleeps', 'messages', 'iterations_too_long', 'longest_iteration_ns', 'longest_iteration_cause']),
          listSection(state, 'threads', 'Light threads', ['id', 'name', 'reactor', 'mask', 'busy_percent', 'messages', 'migrations', 'channels', 'pollers'])].filter(Boolean));
    },
  };
}

function devices(state) {
  const live = el('div');
  return {
    element: live,
    reads: ['mirrors', 'paths', 'delays'],
    draw() {
      const found = [listSection(state, 'mirrors', 'Mirrors', ['device', 'health', 'legs_in_sync', 'legs', 'dirty_regions', 'left_regions', 'left_ns']), listSection(state, 'paths', 'Paths to remote devices'), listSection(state, 'delays', 'Delays')].filter(Boolean).flat();
      replace(live, found.length ? found : el('p', { class: 'dim' }, 'This process has neither mirrors nor paths.'));
    },
  };
}

function eventTable(list) {
  return dataTable(['time', 'kind', 'text'], list, {});
}

function eventsView(state) {
  const live = el('div', { 'aria-live': 'off' });
  const filter = el('input', { type: 'search', id: 'event-filter', placeholder: 'kind or text', oninput: () => draw() });
  const pause = el('input', { type: 'checkbox', onchange: () => draw() });
  let paused = null;
  const draw = () => {
    paused = pause.checked ? paused ?? [...state.events] : null;
    const wanted = filter.value.toLowerCase();
    const found = (paused ?? state.events).filter(one => `${one.kind} ${one.text}`.toLowerCase().includes(wanted));
    replace(live, eventTable(found));
  };
  return {
    element: el('div', {}, el('div', { class: 'toolbar' }, el('label', {}, 'Filter ', filter), el('label', {}, pause, ' Pause')), live),
    drawsEvents: true,
    draw,
  };
}

/** Every operation of the API with its form. */
function methods(state) {
  const filter = el('input', { type: 'search', placeholder: 'name or description', oninput: () => draw() });
  const list = el('div');
  let shown = '';
  const draw = () => {
    const wanted = filter.value.toLowerCase();
    const all = state.operations.filter(one => one.name !== 'events' && one.name !== 'openapi.json' && `${one.path} ${one.summary}`.toLowerCase().includes(wanted));
    const key = all.map(one => one.method + one.path).join('\n');
    // The forms hold what the user has typed: they are only made again if the list changes.
    if (key === shown) return;
    shown = key;
    list.replaceChildren(...all.map(operation => {
      const details = el('details', {}, el('summary', {}, el('code', {}, `${operation.method} ${operation.path}`), ' ', el('span', { class: 'dim' }, operation.summary)));
      details.addEventListener('toggle', () => { if (details.open && details.children.length === 1) details.append(operationForm(operation, {}, state.refresh)); });
      return details;
    }));
  };
  return { element: el('div', {}, el('div', { class: 'toolbar' }, el('label', {}, 'Filter ', filter), el('a', { href: 'v1/openapi.json' }, 'OpenAPI document')), list), draw };
}

export const VIEWS = [
  { name: 'overview', title: 'Overview', make: overview },
  { name: 'io', title: 'I/O', make: io },
  { name: 'exports', title: 'Exports', make: exportsView },
  { name: 'volumes', title: 'Volumes', make: volumes },
  { name: 'devices', title: 'Devices', make: devices },
  { name: 'reactors', title: 'Reactors', make: reactors },
  { name: 'events', title: 'Events', make: eventsView },
  { name: 'methods', title: 'API', make: methods },
];


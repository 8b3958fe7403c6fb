// Rates and percentiles between two samples of /metrics, kept for the last minutes.

const KEPT = 300;
const OPERATIONS = ['read', 'write'];

/** Sums of one sample by name. */
function readSample(samples, at) {
  const sample = { at, rows: new Map(), limits: new Map(), buckets: new Map(), reactors: new Map(), gauges: new Map() };
  for (const [name, labels, value] of samples) {
    if (name.startsWith('tenmil_io_') && labels.operation !== undefined) {
      if (name === 'tenmil_io_duration_seconds_bucket') {
        const key = JSON.stringify([labels.protocol, labels.export, labels.namespace ?? '', labels.operation]);
        const buckets = sample.buckets.get(key) ?? [];
        buckets.push([labels.le === '+Inf' ? Infinity : Number(labels.le), value]);
        sample.buckets.set(key, buckets);
        continue;
      }
      const part = { tenmil_io_operations_total: 'count', tenmil_io_bytes_total: 'bytes', tenmil_io_failed_operations_total: 'failed', tenmil_io_time_seconds_total: 'time' }[name];
      if (!part) continue;
      const key = JSON.stringify([labels.protocol, labels.export, labels.namespace ?? '', labels.host ?? '', labels.operation]);
      const row = sample.rows.get(key) ?? { count: 0, bytes: 0, failed: 0, time: 0 };
      row[part] += value;
      sample.rows.set(key, row);
    } else if (name === 'tenmil_io_limited_operations_total' || name === 'tenmil_io_limit_wait_seconds_total') {
      const key = JSON.stringify([labels.protocol, labels.export, labels.namespace ?? '', labels.host ?? '']);
      const row = sample.limits.get(key) ?? { limited: 0, wait: 0 };
      row[name.includes('wait') ? 'wait' : 'limited'] += value;
      sample.limits.set(key, row);
    } else if (name === 'tenmil_reactor_busy_seconds_total' || name === 'tenmil_reactor_idle_seconds_total') {
      const reactor = sample.reactors.get(labels.reactor) ?? { busy: 0, idle: 0 };
      reactor[name.includes('busy') ? 'busy' : 'idle'] = value;
      sample.reactors.set(labels.reactor, reactor);
    } else if (!name.endsWith('_bucket')) {
      const list = sample.gauges.get(name) ?? [];
      list.push([labels, value]);
      sample.gauges.set(name, list);
    }
  }
  return sample;
}

/** Value that `share` of the values do not exceed, by linear interpolation within a bucket. */
export function percentile(buckets, share) {
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return NaN;
  const rank = share * total;
  let [lower, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= rank) {
      if (bound === Infinity) return lower;
      return count > below ? lower + (bound - lower) * (rank - below) / (count - below) : bound;
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

export class History {
  constructor() {
    this.last = null;
    this.points = [];
  }

  /** Adds a sample of /metrics. */
  add(samples, at) {
    const now = readSample(samples, at);
    const before = this.last;
    this.last = now;
    if (!before || at <= before.at) return;
    const seconds = (at - before.at) / 1000;
    const rate = (new_, old) => Math.max(new_ - (old ?? 0), 0) / seconds;
    const rows = [];
    for (const [key, row] of now.rows) {
      const old = before.rows.get(key);
      // A counter that is lower was started again.
      const base = old && old.count <= row.count ? old : undefined;
      const [protocol, export_, namespace, host, operation] = JSON.parse(key);
      const count = row.count - (base?.count ?? 0);
      rows.push({
        protocol, export: export_, namespace, host, operation, count: rate(row.count, base?.count), bytes: rate(row.bytes, base?.bytes),
        failed: rate(row.failed, base?.failed), time: rate(row.time, base?.time), mean: count > 0 ? (row.time - (base?.time ?? 0)) / count : NaN,
      });
    }
    const limits = [...now.limits].map(([key, row]) => {
      const old = before.limits.get(key);
      const [protocol, export_, namespace, host] = JSON.parse(key);
      return { protocol, export: export_, namespace, host, limited: rate(row.limited, old?.limited), wait: rate(row.wait, old?.wait) };
    });
    const buckets = [];
    for (const [key, list] of now.buckets) {
      const old = new Map(before.buckets.get(key) ?? []);
      const [protocol, export_, namespace, operation] = JSON.parse(key);
      list.sort((a, b) => a[0] - b[0]);
      buckets.push({ protocol, export: export_, namespace, operation, counts: list.map(([bound, count]) => [bound, Math.max(count - (old.get(bound) ?? 0), 0)]) });
    }
    const reactors = [...now.reactors].map(([id, one]) => {
      const old = before.reactors.get(id) ?? { busy: 0, idle: 0 };
      const [busy, idle] = [Math.max(one.busy - old.busy, 0), Math.max(one.idle - old.idle, 0)];
      return { id, busy: busy + idle > 0 ? busy / (busy + idle) : NaN };
    });
    this.points.push({ at, rows, limits, buckets, reactors });
    if (this.points.length > KEPT) this.points.shift();
  }

  /** Sum of a gauge or counter of the last sample, over the series that `matches` accepts. */
  sum(name, matches = () => true) {
    const list = this.last?.gauges.get(name);
    return list ? list.filter(([labels]) => matches(labels)).reduce((sum, [, value]) => sum + value, 0) : NaN;
  }

  /** Series of a gauge of the last sample, as [labels, value]. */
  series(name) {
    return this.last?.gauges.get(name) ?? [];
  }

  /** Points of a chart: for each operation, the sum of a part of the rows that `matches` accepts. */
  rates(part, matches) {
    return this.points.map(point => ({
      at: point.at,
      values: OPERATIONS.map(operation => point.rows.filter(row => row.operation === operation && matches(row)).reduce((sum, row) => sum + row[part], 0)),
    }));
  }

  /** Points of a chart: percentiles of the latency of an operation. */
  percentiles(operation, shares, matches) {
    return this.points.map(point => {
      const merged = new Map();
      for (const one of point.buckets.filter(one => one.operation === operation && matches(one))) {
        for (const [bound, count] of one.counts) merged.set(bound, (merged.get(bound) ?? 0) + count);
      }
      const buckets = [...merged].sort((a, b) => a[0] - b[0]);
      return { at: point.at, values: shares.map(share => percentile(buckets, share)) };
    });
  }

  /** Points of a chart: busy share of each reactor, in the order of `ids`. */
  busy(ids) {
    return this.points.map(point => ({ at: point.at, values: ids.map(id => 100 * (point.reactors.find(one => one.id === id)?.busy ?? NaN)) }));
  }
}

// Requests to the control API of this process, and what its answers mean. Everything is relative to the
// address of the page; no other host is contacted.

const TOKEN = 'tenmil-token';

/** An answer other than success. `missing` is true if the process has no such part, as no pools. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code;
    this.hint = error?.hint;
    this.missing = status === 404;
  }
}

function headers(extra = {}) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...extra, Authorization: `Bearer ${token}` } : extra;
}

/** Keeps a token for this tab. */
export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token); else sessionStorage.removeItem(TOKEN);
}

/** Sends a request and returns the JSON of its answer. */
export async function call(method, path, body) {
  const options = { method, headers: headers({ Accept: 'application/json' }), cache: 'no-store', redirect: 'error' };
  if (body !== undefined) {
    options.headers['Content-Type'] = 'application/json';
    options.body = JSON.stringify(body);
  }
  const answer = await fetch(path, options);
  const text = await answer.text();
  let value = null;
  try { value = text ? JSON.parse(text) : null; } catch { value = null; }
  if (!answer.ok) throw new ApiError(answer.status, value?.error);
  return value;
}

/** Calls a method that reads. */
export function get(name, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return call('GET', `v1/${name}${query ? `?${query}` : ''}`);
}

/** The same; `null` if the process has no such part. */
export async function getIfPresent(name, parameters) {
  try {
    return await get(name, parameters);
  } catch (error) {
    if (error instanceof ApiError && error.missing) return null;
    throw error;
  }
}

/** Samples of /metrics as a list of [name, labels, value]. */
export async function metrics() {
  const answer = await fetch('metrics', { headers: headers({ Accept: 'text/plain;version=0.0.4' }), cache: 'no-store' });
  if (!answer.ok) throw new ApiError(answer.status, null);
  return parseMetrics(await answer.text());
}

/** Parses the Prometheus text format. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split('\n')) {
    if (line === '' || line.startsWith('#')) continue;
    const name = /^[A-Za-z_:][A-Za-z0-9_:]*/.exec(line)?.[0];
    if (!name) continue;
    let at = name.length;
    const labels = {};
    if (line[at] === '{') {
      at += 1;
      while (line[at] !== '}') {
        const equals = line.indexOf('=', at);
        if (equals < 0) break;
        const label = line.slice(at, equals).replace(/^,/, '');
        let value = '';
        for (at = equals + 2; at < line.length && line[at] !== '"'; at += 1) {
          if (line[at] === '\\') { at += 1; value += line[at] === 'n' ? '\n' : line[at]; } else value += line[at];
        }
        labels[label] = value;
        at += 1;
      }
      at += 1;
    }
    samples.push([name, labels, Number(line.slice(at).trim().split(' ')[0])]);
  }
  return samples;
}

/** Subscribes to events until `signal` is aborted. Calls `onEvent` with each and `onState` with the state of the stream. */
export async function events(onEvent, onState, signal) {
  let wait = 500;
  while (!signal.aborted) {
    try {
      const answer = await fetch('v1/events', { headers: headers({ Accept: 'text/event-stream' }), cache: 'no-store', signal });
      if (!answer.ok) throw new ApiError(answer.status, null);
      onState(true);
      wait = 500;
      await readEventStream(answer.body, onEvent);
    } catch (error) {
      if (signal.aborted) return;
    }
    onState(false);
    await new Promise(resolve => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, 10_000);
  }
}

async function readEventStream(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      try { onEvent(JSON.parse(line.slice(5))); } catch { /* a line that is no JSON is no event */ }
    }
  }
}

let document_;
/** Operations of the API: [{ method, path, segments, parameters, fields, summary, result }]. */
export async function operations() {
  document_ ??= readOperations(await call('GET', 'v1/openapi.json'));
  return document_;
}

function readOperations(openapi) {
  const resolve = schema => {
    for (let depth = 0; schema?.$ref && depth < 8; depth += 1) {
      schema = schema.$ref.replace(/^#\//, '').split('/').reduce((at, key) => at?.[key.replaceAll('~1', '/').replaceAll('~0', '~')], openapi);
    }
    return schema ?? {};
  };
  const all = [];
  for (const [path, item] of Object.entries(openapi.paths ?? {})) {
    for (const method of ['get', 'post', 'patch', 'put', 'delete']) {
      const operation = item[method];
      if (!operation || !path.startsWith('/v1/')) continue;
      const declared = [...(item.parameters ?? []), ...(operation.parameters ?? [])].map(resolve);
      const parameters = declared.filter(one => one.in === 'path' || one.in === 'query')
        .map(one => ({ name: one.name, in: one.in, required: !!one.required || one.in === 'path', help: one.description ?? '', schema: resolve(one.schema) }));
      const body = resolve(resolve(operation.requestBody).content?.['application/json']?.schema);
      const fields = Object.entries(body.properties ?? {}).map(([name, schema]) => {
        const resolved = resolve(schema);
        return { name, in: 'body', required: (body.required ?? []).includes(name), help: schema.description ?? resolved.description ?? '', schema: resolved };
      });
      const segments = path.slice('/v1/'.length).split('/');
      all.push({
        method: method.toUpperCase(), path, segments, name: segments[0],
        parameters: [...parameters, ...fields], hasBody: !!operation.requestBody,
        summary: operation.summary ?? operation.description ?? path,
      });
    }
  }
  return all;
}

/** Performs an operation with these values by name of parameter. */
export function perform(operation, values) {
  let path = operation.path.slice(1);
  const query = new URLSearchParams();
  const body = {};
  for (const parameter of operation.parameters) {
    const value = values[parameter.name];
    if (parameter.in === 'path') {
      path = path.replace(`{${parameter.name}}`, encodeURIComponent(value ?? ''));
    } else if (value === undefined) {
      continue;
    } else if (parameter.in === 'query') {
      for (const one of [value].flat()) query.append(parameter.name, one);
    } else {
      body[parameter.name] = value;
    }
  }
  const text = query.toString();
  return call(operation.method, text ? `${path}?${text}` : path, operation.hasBody ? body : undefined);
}

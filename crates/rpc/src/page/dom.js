// Elements and formats. Text is only ever set as text nodes and attributes, never as markup: names come
// from hosts and from other users.

/** Creates an element with properties and children; a child that is no node becomes text. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'class') element.className = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(printable(child)));
  }
  return element;
}

/** Text without control characters and without characters that change the direction of what follows. */
export function printable(value) {
  return String(value).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, '\ufffd');
}

/** Number with three digits and a decimal unit: 12.3k. */
export function short(value) {
  if (!Number.isFinite(value)) return '–';
  for (const [scale, unit] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (value >= scale * 0.9995) return digits(value / scale) + unit;
  }
  return digits(value);
}

function digits(value) {
  if (value >= 99.95 || Math.abs(value - Math.round(value)) < 0.005) return value.toFixed(0);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

/** Size in binary units. */
export function bytes(value) {
  if (!Number.isFinite(value)) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];
  let unit = 0;
  while (value >= 1024 && unit + 1 < units.length) { value /= 1024; unit += 1; }
  return `${unit ? digits(value) : value} ${units[unit]}`;
}

/** Duration, given in seconds. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–';
  if (seconds < 1e-6) return `${(seconds * 1e9).toFixed(0)} ns`;
  if (seconds < 1e-3) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes} min` : `${minutes} min`;
}

/** Value of a field whose name ends in its unit. */
export function field(name, value) {
  if (value === null || value === undefined) return '–';
  if (typeof value === 'number') {
    if (name.endsWith('_bytes') || name === 'bytes') return bytes(value);
    if (name.endsWith('_ns')) return duration(value / 1e9);
    if (name.endsWith('_percent')) return `${digits(value)} %`;
    return Number.isInteger(value) ? String(value) : digits(value);
  }
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  if (Array.isArray(value)) return value.map(one => field('', one)).join(', ');
  if (typeof value === 'object') return Object.entries(value).map(([key, one]) => `${key}: ${field(key, one)}`).join(', ');
  return String(value);
}

/** Title of a name: `limit_iops` is "limit iops". */
export function title(name) {
  return name.replace(/_(ns|percent)$/, '').replaceAll('_', ' ');
}

/** Replaces the children of a region. Keeps the focus on the element with the same `data-key`, and does nothing while text in the region is selected. */
export function replace(region, ...children) {
  const selection = document.getSelection();
  if (selection && !selection.isCollapsed && region.contains(selection.anchorNode)) return;
  const focused = region.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = [...region.querySelectorAll('.scroll')].map(one => one.scrollLeft);
  region.replaceChildren(...children.flat(Infinity).filter(child => child instanceof Node));
  [...region.querySelectorAll('.scroll')].forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
  if (focused !== undefined) {
    [...region.querySelectorAll('[data-key]')].find(one => one.dataset.key === focused)?.focus({ preventScroll: true });
  }
}

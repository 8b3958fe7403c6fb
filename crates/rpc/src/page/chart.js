// Line charts as SVG: time on the x axis, a few series, a cursor with the values at a time.

import { el } from './dom.js';

const NS = 'http://www.w3.org/2000/svg';
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [180, 62, 8, 8, 20];

function svg(tag, attributes = {}, text) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Smallest of 1, 2 or 5 times a power of ten that is at least `value`; of bytes, times a power of 1024, too. */
export function niceCeiling(value, isBytes = false) {
  if (!(value > 0)) return 1;
  const unit = isBytes && value > 1 ? 1024 ** Math.floor(Math.log2(value) / 10) : 1;
  const scale = 10 ** Math.floor(Math.log10(value / unit));
  return unit * [1, 2, 5, 10].map(step => step * scale).find(step => step >= value / unit * (1 - 1e-9));
}

/** A chart that is drawn again with new points. */
export class Chart {
  /** `series` is a list of names and `format` shows a value. */
  constructor(heading, series, format, { max, isBytes } = {}) {
    this.heading = heading;
    this.format = format;
    this.max = max;
    this.isBytes = isBytes;
    this.width = 600;
    this.points = [];
    this.cursor = null;
    this.svg = svg('svg', { class: 'chart', role: 'img', tabindex: '0' });
    this.legend = el('ul', { class: 'legend' });
    this.element = el('section', { class: 'card' }, el('h3', {}, heading), this.svg, this.legend);
    this.setSeries(series);
    this.svg.addEventListener('pointermove', event => this.moveCursor(event));
    this.svg.addEventListener('pointerleave', () => { this.cursor = null; this.draw(); });
    this.svg.addEventListener('keydown', event => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === 'Escape') this.cursor = null;
      else if (step) this.cursor = Math.min(Math.max((this.cursor ?? this.points.length) + step, 0), this.points.length - 1);
      else return;
      event.preventDefault();
      this.draw();
    });
  }

  setSeries(series) {
    if (this.series && this.series.join('\n') === series.join('\n')) return;
    this.series = series;
    this.values = series.map(() => document.createTextNode(''));
    this.legend.replaceChildren(...series.map((name, index) =>
      el('li', {}, el('span', { class: `swatch b${index % 6}` }), name, ' ', this.values[index])));
  }

  /** Shows points of the form { at, values }; a value that is not finite is a gap. */
  setPoints(points) {
    const latest = this.points.at(-1)?.at;
    if (this.cursor !== null && latest !== undefined) {
      const at = this.points[this.cursor]?.at;
      const moved = points.findIndex(point => point.at === at);
      this.cursor = moved < 0 ? null : moved;
    }
    this.points = points;
    this.draw();
  }

  moveCursor(event) {
    const box = this.svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * this.width;
    const found = this.points.map((point, index) => [Math.abs(this.x(point.at) - x), index]).sort((a, b) => a[0] - b[0])[0];
    this.cursor = found ? found[1] : null;
    this.draw();
  }

  x(at) {
    const [first, last] = [this.points[0].at, this.points.at(-1).at];
    return LEFT + (at - first) / Math.max(last - first, 1) * (this.width - LEFT - RIGHT);
  }

  draw() {
    const { points, series } = this;
    this.width = this.svg.clientWidth || this.width;
    const { width } = this;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    const all = points.flatMap(point => point.values).filter(Number.isFinite);
    const top = this.max ?? niceCeiling(Math.max(0, ...all), this.isBytes);
    const y = value => HEIGHT - BOTTOM - Math.min(value / top, 1) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * top);
      parts.push(svg('line', { class: 'grid', x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(svg('text', { x: LEFT - 5, y: at + 4, 'text-anchor': 'end' }, this.format(share * top)));
    }
    if (points.length > 1) {
      const age = (points.at(-1).at - points[0].at) / 1000;
      parts.push(svg('text', { x: LEFT, y: HEIGHT - 5 }, `${age < 120 ? `${Math.round(age)} s` : `${Math.round(age / 60)} min`} ago`));
      parts.push(svg('text', { x: width - RIGHT, y: HEIGHT - 5, 'text-anchor': 'end' }, 'now'));
      series.forEach((name, index) => parts.push(svg('path', { class: `k${index % 6}`, d: this.line(index, y) })));
    }
    const shown = points[this.cursor ?? points.length - 1];
    if (this.cursor !== null && shown) {
      const at = this.x(shown.at);
      parts.push(svg('line', { class: 'cursor', x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
      parts.push(svg('text', { x: Math.min(at + 4, width - 70), y: TOP + 10 }, new Date(shown.at).toLocaleTimeString()));
    }
    const texts = series.map((name, index) => this.format(shown?.values[index]));
    texts.forEach((text, index) => { this.values[index].data = text; });
    this.svg.setAttribute('aria-label', `${this.heading}: ${series.map((name, index) => `${name} ${texts[index]}`).join(', ')}`);
    this.svg.replaceChildren(...parts);
  }

  line(index, y) {
    let path = '';
    let isPen = false;
    for (const point of this.points) {
      const value = point.values[index];
      if (Number.isFinite(value)) path += `${isPen ? 'L' : 'M'}${this.x(point.at).toFixed(1)},${y(value).toFixed(1)}`;
      isPen = Number.isFinite(value);
    }
    return path;
  }
}

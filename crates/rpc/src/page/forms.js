// Forms made from the operations of the API: a field for each parameter, checked by the server.

import { ApiError, perform } from './api.js';
import { el, field, printable, title } from './dom.js';

const dialog = document.getElementById('dialog');
const heading = document.getElementById('dialog-title');
const body = document.getElementById('dialog-body');

document.getElementById('dialog').addEventListener('close', () => body.replaceChildren());

/** Opens the dialog with this content. */
export function openDialog(text, ...content) {
  heading.textContent = printable(text);
  body.replaceChildren(...content);
  if (!dialog.open) dialog.showModal();
  (body.querySelector('input:not([readonly]), select, textarea') ?? body.querySelector('button'))?.focus();
}

export function closeDialog() {
  if (dialog.open) dialog.close();
}

/** Asks for a text, as a token. */
export function askText(text, label, type, onText) {
  const input = el('input', { type, autocomplete: 'off' });
  openDialog(text, el('form', { class: 'fields', onsubmit: event => { event.preventDefault(); closeDialog(); onText(input.value); } },
    el('label', {}, label, input), el('div', { class: 'toolbar' }, el('button', { class: 'primary' }, 'Continue'), cancelButton())));
}

function cancelButton() {
  return el('button', { type: 'button', onclick: closeDialog }, 'Cancel');
}

/** Kind of input that a schema needs. */
function inputKind(schema) {
  if (schema.oneOf || schema.anyOf) {
    const all = schema.oneOf ?? schema.anyOf;
    return all.some(one => one.type === 'array') ? 'list' : inputKind(all.find(one => one.type !== 'null') ?? {});
  }
  if (schema.enum) return 'choice';
  const type = [schema.type].flat().find(one => one !== 'null');
  return { boolean: 'flag', integer: 'number', number: 'number', array: 'list', object: 'json' }[type] ?? 'text';
}

function makeInput(parameter, value, present) {
  const { schema, name } = parameter;
  const placeholder = present === null || present === undefined || typeof present === 'object' ? null : printable(`now ${present}`);
  const common = { name, placeholder, required: parameter.required && inputKind(schema) !== 'flag', 'aria-describedby': `help-${name}` };
  const given = value ?? schema.default;
  switch (inputKind(schema)) {
    case 'choice': return select(common, ['', ...schema.enum], given);
    case 'flag': return select(common, parameter.required ? ['true', 'false'] : ['', 'true', 'false'], given === undefined ? undefined : String(given));
    case 'number': return el('input', { ...common, type: 'text', inputmode: 'numeric', pattern: '-?[0-9]+(\\.[0-9]+)?', value: given, title: 'a number' });
    case 'list': return el('textarea', { ...common, placeholder: 'one in each line', rows: 2 }, given === undefined ? '' : [given].flat().join('\n'));
    case 'json': return el('textarea', { ...common, rows: 3, placeholder: '{}' }, given === undefined ? '' : JSON.stringify(given));
    default: return el('input', { ...common, type: 'text', value: given, maxlength: schema.maxLength, autocomplete: 'off', spellcheck: 'false' });
  }
}

function select(properties, choices, chosen) {
  return el('select', properties, choices.map(choice => el('option', { value: choice, selected: choice === String(chosen ?? '') }, choice === '' ? '–' : choice)));
}

/** Value of an input, or `undefined` if it is empty. A number that JavaScript cannot hold exactly is rejected. */
function readInput(parameter, input) {
  const text = input.value;
  if (text === '') return undefined;
  switch (inputKind(parameter.schema)) {
    case 'flag': return text === 'true';
    case 'number': {
      const number = Number(text);
      if (!Number.isFinite(number) || (Number.isInteger(number) && !Number.isSafeInteger(number))) {
        throw new ApiError(0, { message: `${parameter.name} is ${text}, expected a number up to 9007199254740991` });
      }
      return number;
    }
    case 'list': {
      const lines = text.split('\n').map(line => line.trim()).filter(line => line !== '');
      return lines.length ? lines : undefined;
    }
    case 'json': {
      try { return JSON.parse(text); } catch { throw new ApiError(0, { message: `${parameter.name} is no JSON, expected an object` }); }
    }
    default: return text;
  }
}

/** What an operation does, as a verb. */
export function verb(operation) {
  const changes = { GET: 'Show', DELETE: 'Delete', PATCH: 'Change' };
  return changes[operation.method] ?? (operation.isCreate ? 'Create' : 'Apply');
}

/** A form that performs an operation. `given` are values by name; those of path parameters are fixed. Of `present` values the form only shows what they are, and sends what the user enters. */
export function operationForm(operation, given = {}, onDone = () => {}, present = {}) {
  const inputs = new Map();
  const fields = operation.parameters.map(parameter => {
    const input = makeInput(parameter, given[parameter.name], present[parameter.name]);
    if (parameter.in === 'path' && given[parameter.name] !== undefined) input.readOnly = true;
    inputs.set(parameter, input);
    return el('label', {}, el('span', {}, title(parameter.name), parameter.required ? ' *' : ''), input,
      el('span', { class: 'help', id: `help-${parameter.name}` }, parameter.help, range(parameter.schema)));
  });
  const result = el('div', { 'aria-live': 'polite' });
  const isDanger = operation.method === 'DELETE' || /(^|_)(delete|remove|rollback)$/.test(operation.name);
  const submit = el('button', { class: isDanger ? 'danger' : 'primary' }, verb(operation));
  const send = async event => {
    event.preventDefault();
    submit.disabled = true;
    try {
      const values = {};
      for (const [parameter, input] of inputs) {
        const value = readInput(parameter, input);
        if (value !== undefined) values[parameter.name] = value;
      }
      const answer = await perform(operation, values);
      result.replaceChildren(el('p', { class: 'good', 'data-result': 'done' }, 'Done.'), showValue(answer));
      onDone(answer);
    } catch (error) {
      result.replaceChildren(errorMessage(error));
    } finally {
      submit.disabled = false;
    }
  };
  return el('form', { class: 'fields', onsubmit: send, 'data-operation': `${operation.method} ${operation.path}` },
    el('p', { class: 'dim' }, operation.summary, '. ', el('code', {}, `${operation.method} ${operation.path}`)),
    fields, el('div', { class: 'toolbar' }, submit, el('button', { type: 'button', onclick: closeDialog }, 'Close')), result);
}

/** Opens a form in the dialog. After a deletion it is closed. */
export function openOperation(operation, given, onDone, present) {
  openDialog(`${verb(operation)}: ${title(operation.name)}`, operationForm(operation, given, answer => {
    if (operation.method === 'DELETE' || operation.isCreate) closeDialog();
    onDone?.(answer);
  }, present));
}

function range(schema) {
  if (inputKind(schema) !== 'number' || (schema.minimum === undefined && schema.maximum === undefined)) return '';
  const most = schema.maximum > Number.MAX_SAFE_INTEGER ? undefined : schema.maximum;
  return ` (${schema.minimum ?? ''} to ${most ?? 'any'})`;
}

/** Error of a request with its hint. */
export function errorMessage(error) {
  return el('div', { class: 'message bad', role: 'alert' }, error.message ?? String(error), error.hint ? el('div', { class: 'dim' }, error.hint) : null);
}

/** Any JSON value: rows as a table, an object as a list of its members. */
export function showValue(value) {
  if (value === null || value === undefined) return el('p', { class: 'dim' }, 'No result.');
  if (Array.isArray(value) && value.length && value.every(one => one && typeof one === 'object' && !Array.isArray(one))) {
    return dataTable(Object.keys(value[0]), value);
  }
  if (typeof value === 'object' && !Array.isArray(value)) {
    return el('div', { class: 'scroll' }, el('table', {}, el('tbody', {}, Object.entries(value).map(([name, one]) =>
      el('tr', {}, el('th', { scope: 'row' }, title(name)), el('td', {}, nested(one) ? el('pre', {}, JSON.stringify(one, null, 1)) : field(name, one)))))));
  }
  return Array.isArray(value) && value.length === 0 ? el('p', { class: 'dim' }, 'None.') : el('pre', {}, JSON.stringify(value, null, 1));
}

function nested(value) {
  return Array.isArray(value) ? value.some(one => one && typeof one === 'object') : value && typeof value === 'object';
}

const orders = new Map();

/** Table of rows. Its headings sort it; `actions` makes the buttons of a row. */
export function dataTable(names, rows, { id, actions, cell } = {}) {
  if (rows.length === 0) return el('p', { class: 'dim' }, 'None.');
  const order = orders.get(id);
  const sorted = order ? [...rows].sort((a, b) => compare(a[order.name], b[order.name]) * order.sign) : rows;
  const isNumber = name => rows.some(row => typeof row[name] === 'number') && rows.every(row => row[name] === null || row[name] === undefined || typeof row[name] === 'number');
  const container = el('div', { class: 'scroll' });
  const sortBy = name => {
    const old = orders.get(id);
    orders.set(id, { name, sign: old?.name === name ? -old.sign : isNumber(name) ? -1 : 1 });
    container.replaceWith(dataTable(names, rows, { id, actions, cell }));
  };
  const head = names.map(name => el('th', { scope: 'col', class: isNumber(name) ? 'number' : null, 'aria-sort': order?.name === name ? (order.sign > 0 ? 'ascending' : 'descending') : null },
    id ? el('button', { type: 'button', 'data-key': `sort-${id}-${name}`, onclick: () => sortBy(name) }, title(name)) : title(name)));
  container.append(el('table', {}, el('thead', {}, el('tr', {}, head, actions ? el('th', { scope: 'col' }, 'Actions') : null)),
    el('tbody', {}, sorted.map(row => el('tr', {}, names.map(name => el('td', { class: isNumber(name) ? 'number' : null }, cell?.(name, row) ?? field(name, row[name]))),
      actions ? el('td', { class: 'actions' }, actions(row)) : null)))));
  return container;
}

function compare(a, b) {
  if (typeof a === 'number' && typeof b === 'number') return a - b;
  return String(a ?? '').localeCompare(String(b ?? ''), undefined, { numeric: true });
}

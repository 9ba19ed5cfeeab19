// Tables whose rows stay where they are while their texts change, so that focus and pointer stay too.
// Every text goes in by textContent: names of keys, reasons and log lines may hold anything.
"use strict";

/**
 * Write a text where it is not there already.
 * @param {Node} node
 * @param {string} text
 */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The rows of one table, each known by a request's id. */
class RowSet {
  /**
   * @param {HTMLTableSectionElement} body
   * @param {string[]} columns The classes of the cells behind the first, which holds the id.
   * @param {function(string): void} onPick Called with the id that somebody picks.
   */
  constructor(body, columns, onPick) {
    this._body = body;
    this._columns = columns;
    this._onPick = onPick;
    /** @type {Map<string, HTMLTableRowElement>} */
    this._rows = new Map();
  }

  /**
   * @param {Object[]} requests In order.
   * @param {function(Object): string[]} describe A request's texts, one a column.
   * @param {?string} pinnedId The request that stands out.
   * @param {function(string): string} colourOf The colour's name of a request, empty = none.
   */
  update(requests, describe, pinnedId, colourOf) {
    const present = new Set(requests.map((request) => request.id));
    for (const [id, row] of this._rows) {
      if (present.has(id)) continue;
      row.remove();
      this._rows.delete(id);
    }
    requests.forEach((request, index) => {
      const row = this._rows.get(request.id) ?? this._create(request.id);
      if (this._body.rows[index] !== row) this._body.insertBefore(row, this._body.rows[index] ?? null);
      row.classList.toggle("pinned", request.id === pinnedId);
      this._fill(row, request, describe(request), colourOf(request.id), request.id === pinnedId);
    });
  }

  _create(id) {
    const row = document.createElement("tr");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "request";
    button.addEventListener("click", () => this._onPick(id));
    row.insertCell().append(button);
    setText(button, id);
    button.title = id;
    for (const column of this._columns) row.insertCell().className = column;
    this._rows.set(id, row);
    return row;
  }

  _fill(row, request, texts, colour, isPinned) {
    const button = row.cells[0].firstChild;
    button.setAttribute("aria-pressed", String(isPinned));
    button.style.setProperty("--color", colour ? `var(--${colour})` : "");
    this._columns.forEach((column, index) => {
      const cell = row.cells[index + 1];
      if (column.includes("prompt")) fillShare(cell, texts[index], request.prompt_computed / request.prompt_tokens);
      else setText(cell, texts[index]);
      if (column.includes("why")) {
        cell.title = texts[index];
        cell.classList.toggle("waits", request.waits_for !== "");
        cell.classList.toggle("behind", request.waits_for.startsWith("behind "));
      }
    });
  }
}

/**
 * Show a text, and a thin bar below it while there is a part to show.
 * @param {HTMLTableCellElement} cell
 * @param {string} text
 * @param {number} share How much of the bar is full, 0..1.
 */
function fillShare(cell, text, share) {
  if (!cell.firstChild) {
    const bar = document.createElement("span");
    bar.className = "share";
    bar.append(document.createElement("span"));
    cell.append(document.createElement("span"), bar);
  }
  setText(cell.firstChild, text);
  cell.lastChild.classList.toggle("partial", share > 0 && share < 1);
  cell.lastChild.firstChild.style.width = `${Math.round(share * 100)}%`;
}

/**
 * Show the log's last warnings and errors.
 * @param {HTMLOListElement} list
 * @param {{unix_time: number, level: string, text: string}[]} errors The latest first.
 */
function fillErrors(list, errors) {
  while (list.children.length > errors.length) list.lastChild.remove();
  errors.forEach((error, index) => {
    const item = list.children[index] ?? list.appendChild(createErrorItem());
    const [time, level, text] = item.children;
    setText(time, formatTime(error.unix_time));
    setText(level, error.level);
    level.className = `level ${["error", "critical"].includes(error.level) ? error.level : ""}`;
    setText(text, error.text);
  });
}

/** @returns {HTMLLIElement} */
function createErrorItem() {
  const item = document.createElement("li");
  for (const [tag, name] of [["time", "time"], ["span", "level"], ["span", "text"]]) {
    const part = document.createElement(tag);
    part.className = name;
    item.append(part);
  }
  return item;
}

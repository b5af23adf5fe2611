"use strict";

// A cell's number, without a mark before it and what follows it; NaN for an empty cell and n/a, else its text.
function value(cell) {
  const text = cell.textContent.trim().replace(/^[†‡]/, "");
  if (["", "-", "n/a"].includes(text)) return NaN;
  const number = Number.parseFloat(text);
  return Number.isNaN(number) ? text : number;
}

// Cells without a number go last in either direction.
function compare(a, b, sign) {
  const known = (x) => typeof x === "string" || !Number.isNaN(x);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  if (known(a) !== known(b)) return known(a) ? -1 : 1;
  return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
}

function sortBy(heading) {
  const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].sort((a, b) => compare(value(a.cells[column]), value(b.cells[column]), up ? 1 : -1));
  body.append(...rows);
}

const lines = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim().replace(/\s+/g, " ")));

function markdown(table) {
  const [head, ...body] = lines(table).map((row) => row.map((text) => text.replace(/[\\|*_]/g, "\\$&")));
  const rule = head.map((_, column) => (column ? "---:" : "---"));
  return [head, rule, ...body].map((row) => `| ${row.join(" | ")} |`).join("\n") + "\n";
}

const SPECIAL = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$", "–": "--", "·": "$\\cdot$" };
const escaped = (text) => text.replace(/[\\~^±–·]|[&%$#_{}]/g, (sign) => SPECIAL[sign] || `\\${sign}`);

function latex(table) {
  const [head, ...body] = lines(table).map((row) => row.map(escaped).join(" & ") + " \\\\");
  const columns = "l" + "r".repeat(table.tHead.rows[0].cells.length - 1);
  return [`\\begin{tabular}{${columns}}`, "\\toprule", head, "\\midrule", ...body, "\\bottomrule", "\\end{tabular}"].join("\n") + "\n";
}

// The clipboard of a page opened from a file may be closed to it; an old way is open to any click.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sortBy(button.closest("th")));
for (const button of document.querySelectorAll("button[data-copy]")) {
  const label = button.textContent;
  button.addEventListener("click", async () => {
    const table = button.closest(".table").querySelector("table");
    await copy(button.dataset.copy === "latex" ? latex(table) : markdown(table));
    button.textContent = "copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
}

// Above each table whose headings say so, a list for each of these columns shows the rows with one
// of its values, and a field those with a word.
for (const table of document.querySelectorAll("table")) {
  const rows = [...table.tBodies[0].rows];
  const columns = [...table.tHead.rows[0].cells].filter((heading) => "select" in heading.dataset);
  if (columns.length === 0) continue;
  const value = (row, heading) => {
    const cell = row.cells[heading.cellIndex];
    return cell.dataset.group ?? cell.textContent;
  };
  const form = document.createElement("form");
  form.className = "filters";
  form.addEventListener("submit", (event) => event.preventDefault());
  const add = (name, control) => {
    const label = document.createElement("label");
    label.append(name, control);
    form.append(label);
    control.addEventListener("input", show);
    return control;
  };
  const count = document.createElement("output");
  function show() {
    const word = search.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = selects.every(
        ([heading, select]) => select.selectedIndex === 0 || value(row, heading) === select.value,
      );
      row.hidden = !(fits && row.textContent.toLowerCase().includes(word));
      shown += row.hidden ? 0 : 1;
    }
    // A column of which one value is left would say it in every row.
    for (const [heading, select] of selects) {
      const isSame = select.selectedIndex > 0 && !("group" in rows[0].cells[heading.cellIndex].dataset);
      for (const row of [heading.parentElement, ...rows]) row.cells[heading.cellIndex].hidden = isSame;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
  }
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const selects = columns
    .map((heading) => [heading, [...new Set(rows.map((row) => value(row, heading)))].sort(compare)])
    .filter(([, values]) => values.length > 1)
    .map(([heading, values]) => {
      const select = document.createElement("select");
      select.append(new Option("all", ""), ...values.map((text) => new Option(text, text)));
      return [heading, add(heading.textContent, select)];
    });
  const search = document.createElement("input");
  search.type = "search";
  add("word", search);
  form.append(count);
  table.parentElement.before(form);
  show();
}

"use strict";
// A click on a heading sorts the rows of its table by that column; a second click turns the order.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const rising = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const body = table.tBodies[0];
      const key = ({ cells }) => cells[column].dataset.order ?? cells[column].textContent;
      const isNumber = (text) => text !== "" && Number.isFinite(Number(text));
      const compare = (a, b) =>
        isNumber(a) && isNumber(b) ? Number(a) - Number(b) : a.localeCompare(b, "en");
      const rows = [...body.rows].sort((a, b) => compare(key(a), key(b)));
      body.append(...(rising ? rows : rows.reverse()));
    });
  });
}

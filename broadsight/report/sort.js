// Column heads of long tables become buttons that sort. Without scripts the tables stay as they are.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 3) continue;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("n");
    const value = (row) => {
      const text = row.cells[column].textContent.trim();
      if (!numeric) return text;
      const [digits, unit] = text.replace(/,/g, "").split("\u00a0");
      return parseFloat(digits) * ({ k: 1e3, M: 1e6, G: 1e9, T: 1e12 }[unit] ?? 1);
    };
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numeric;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const compare = (a, b) =>
        numeric ? (Number.isNaN(a) - Number.isNaN(b)) || sign * (a - b) || 0 : sign * a.localeCompare(b);
      body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
    });
  });
}

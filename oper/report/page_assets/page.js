// Draws the figures of the page, and sorts its tables where a header is pressed.
const config = JSON.parse(document.getElementById("config").textContent);
config.legend.columns = window.innerWidth < 600 ? 1 : 4; // as many as fit into a line

async function draw(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const place = figure.querySelector(".drawing");
  await vegaEmbed(place, spec, { renderer: "svg", actions: false, config });
  figure.dataset.drawn = "yes";
}

function sort(header) {
  const body = header.closest("table").tBodies[0];
  const column = header.cellIndex;
  const value = (row) => row.cells[column].dataset.value;
  const numbers = [...body.rows].every((row) => value(row) !== undefined);
  // Numbers begin with the largest, names with the first.
  const before = header.getAttribute("aria-sort");
  const descending = numbers ? before !== "descending" : before === "ascending";
  const name = (row) => row.cells[column].textContent;
  const rows = [...body.rows].sort(
    numbers
      ? (a, b) => Number(value(a)) - Number(value(b))
      : (a, b) => name(a).localeCompare(name(b), undefined, { numeric: true }),
  );
  body.append(...(descending ? rows.reverse() : rows));
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}
Promise.all([...document.querySelectorAll("figure[data-chart]")].map(draw)).then(() => {
  document.documentElement.dataset.drawn = Math.round(performance.now());
});

// Filters, and rows that open. Without this script every row is open and nothing is lost; cards open
// by themselves.
"use strict";
document.documentElement.classList.add("js");
document.addEventListener("DOMContentLoaded", () => {
  const form = document.querySelector(".filters");
  const rows = [...document.querySelectorAll("tr.clause")].map((row) => ({
    row,
    button: row.querySelector("button"),
    detail: row.nextElementSibling,
    text: row.textContent.toLowerCase(),
    outcomes: row.dataset.outcomes.split(" "),
  }));
  const levels = ["course", "correct", "production"];

  function open(entry, isOpen) {
    entry.button.setAttribute("aria-expanded", isOpen);
    entry.detail.classList.toggle("open", isOpen);
  }

  function filter() {
    const { level, chapter, outcome, words } = form.elements;
    const limit = levels.indexOf(level.value);
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const isFiltered = limit >= 0 || chapter.value || outcome.value || wanted.length > 0;
    document.querySelector(".clauses").classList.toggle("filtered", Boolean(isFiltered));
    let shown = 0;
    for (const { row, detail, text, outcomes } of rows) {
      const isShown =
        (limit < 0 || levels.indexOf(row.dataset.level) <= limit) &&
        (!chapter.value || row.id.startsWith(chapter.value + ".")) &&
        (!outcome.value || outcomes.includes(outcome.value)) &&
        wanted.every((word) => text.includes(word));
      row.hidden = detail.hidden = !isShown;
      shown += isShown;
    }
    for (const body of document.querySelectorAll(".clauses tbody"))
      body.hidden = !body.querySelector("tr.clause:not([hidden])");
    form.querySelector("output").textContent = `${shown} of ${rows.length} clauses`;
  }

  function follow() {
    const id = decodeURIComponent(location.hash.slice(1));
    const entry = rows.find(({ row }) => row.id === id);
    let folded = document.getElementById(id)?.closest("details");
    for (; folded; folded = folded.parentElement.closest("details")) folded.open = true;
    if (!entry) return;
    unfold(entry.row.closest("tbody"), true);
    open(entry, true);
    entry.row.scrollIntoView();
  }

  function unfold(body, isWhole) {
    body.classList.toggle("whole", isWhole);
    body.querySelector(".rest")?.setAttribute("aria-expanded", isWhole);
  }

  for (const button of document.querySelectorAll(".rest")) {
    const body = button.closest("tbody");
    button.addEventListener("click", () => unfold(body, !body.classList.contains("whole")));
  }
  for (const entry of rows) {
    entry.button.setAttribute("aria-controls", entry.detail.id);
    open(entry, false);
    entry.button.addEventListener("click", () => open(entry, !entry.detail.classList.contains("open")));
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  document.querySelector("#expand").addEventListener("click", () => {
    const shown = rows.filter(({ row }) => row.getClientRects().length > 0);
    const isOpen = !shown.every(({ detail }) => detail.classList.contains("open"));
    for (const entry of shown) open(entry, isOpen);
  });
  // On paper nothing can be opened.
  matchMedia("print").addEventListener("change", ({ matches }) => {
    if (matches) for (const folded of document.querySelectorAll(".card, .card details")) folded.open = true;
  });
  window.addEventListener("hashchange", follow);
  filter();
  follow();
});

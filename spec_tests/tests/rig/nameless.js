// Controls that a screen reader cannot name, and figures without words.
() => [
  ...[...document.querySelectorAll("button, select, input, a")].filter((node) =>
    !(node.textContent.trim() && node.tagName !== "SELECT") && !node.labels?.length &&
    !node.getAttribute("aria-label")),
  ...document.querySelectorAll("svg:not([role=img], [aria-hidden]), [aria-controls]"),
].filter((node) => !node.hasAttribute("aria-controls") ||
                   !document.getElementById(node.getAttribute("aria-controls")))
 .map((node) => node.outerHTML.slice(0, 80))

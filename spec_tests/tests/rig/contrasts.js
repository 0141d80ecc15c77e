// Of every visible piece of text: its contrast with what it stands on, as WCAG 2 defines it.
() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = (text) => text.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = new Map();
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility() || node.closest("svg")) continue;
    if (![...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const [ink, paper] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const words = `${node.tagName}.${node.className}`;
    found.set(words, Math.min(found.get(words) ?? 21, ratio));
  }
  return Object.fromEntries(found);
}

// Returns the texts of the page whose contrast to their ground is below WCAG's 4.5.
() => {
  const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const groundOf = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const ground = parts(getComputedStyle(each).backgroundColor);
      if (ground.length === 3 || ground[3] > 0) return ground;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (!own || element.closest("noscript") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    const colour = parts(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(colour), light(groundOf(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.className.baseVal ?? element.className}: ${ratio.toFixed(2)} ${element.textContent.trim().slice(0, 40)}`);
  }
  return poor;
}

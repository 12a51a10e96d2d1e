// What a reader of a page would see: labels that overlap or are cut off, and a page that scrolls sideways.
() => {
  const faults = [], side = document.documentElement.clientWidth;
  const shown = (node) => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0 && node.checkVisibility({ opacityProperty: true, visibilityProperty: true }); };
  const name = (node) => node.textContent.trim().slice(0, 40);
  if (document.documentElement.scrollWidth > side) faults.push(`the page scrolls sideways: ${document.documentElement.scrollWidth} > ${side}`);
  for (const svg of document.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    const around = svg.getBoundingClientRect();
    const labels = [...svg.querySelectorAll("text:not([transform])")].filter((text) => name(text) && shown(text)).map((text) => [name(text), text.getBoundingClientRect()]);
    labels.forEach(([one, a], i) => {
      if (a.left < around.left - 1 || a.right > around.right + 1 || a.top < around.top - 2 || a.bottom > around.bottom + 2) faults.push(`cut off by its chart: ${one}`);
      for (const [other, b] of labels.slice(i + 1)) {
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3) faults.push(`overlap: ${one}, ${other}`);
      }
    });
  }
  for (const node of document.body.querySelectorAll("*")) {
    if (node.closest("svg") || ![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()) || !shown(node)) continue;
    if (/hidden|clip/.test(getComputedStyle(node).overflowX) && node.scrollWidth > node.clientWidth + 1 && !node.closest("[title]")) faults.push(`cut off: ${name(node)}`);
    let scroller = node;
    while (scroller && !/auto|scroll/.test(getComputedStyle(scroller).overflowX)) scroller = scroller.parentElement;
    if (!scroller && node.getBoundingClientRect().right > side + 1) faults.push(`past the side of the page: ${name(node)}`);
  }
  return faults;
}

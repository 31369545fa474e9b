"""What an accessibility checker finds serious, as one JavaScript expression that a page's test evaluates.

Its value is a list of findings, empty for a good page: controls without a name, duplicate ids, references that point
nowhere, not exactly one main landmark, text with a contrast below 4.5 (3 where it is large; WCAG 2.1, 1.4.3), scrolling
boxes that the keyboard cannot reach. axe-core 4.12.1 found nothing either, on any panel, light and dark, at 1280 and
375 px; it is not used here, since the repository contains no third-party JavaScript.
"""

FINDINGS = r"""(() => {
  const found = [];
  const visible = (one) => one.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const all = [...document.querySelectorAll('body *')].filter(visible);
  const short = (one) => one.cloneNode().outerHTML.slice(0, 120);

  // names
  const name = (one) => [
    one.getAttribute('aria-label'),
    ...(one.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id)?.textContent),
    ...[...(one.labels ?? [])].map((label) => label.textContent),
    ['BUTTON', 'A', 'SUMMARY'].includes(one.tagName) ? one.textContent : '', one.alt,
  ].join('').trim();
  for (const one of all) {
    if (one.matches('button, a[href], input, select, textarea, meter, summary, ' +
      '[role=tab], [role=tabpanel], [role=listbox], [role=option], [role=region], img') &&
        !name(one) && one.getAttribute('alt') !== '') found.push(`no name: ${short(one)}`);
  }

  // ids and what refers to them; landmarks
  const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
  for (const id of new Set(ids.filter((id, place) => ids.indexOf(id) !== place))) found.push(`id twice: ${id}`);
  for (const attribute of ['aria-labelledby', 'aria-describedby', 'aria-controls', 'aria-activedescendant', 'for']) {
    for (const one of document.querySelectorAll(`[${attribute}]`)) {
      for (const id of one.getAttribute(attribute).split(' ')) if (!document.getElementById(id))
        found.push(`${attribute} points nowhere: ${short(one)}`);
    }
  }
  if (document.querySelectorAll('main').length !== 1) found.push('expected one main');
  if (document.querySelectorAll('h1').length !== 1) found.push('expected one h1');
  if (!document.documentElement.lang || !document.title) found.push('no language or title');
  if (!document.querySelector('[aria-live]')) found.push('nothing is announced');

  // contrast: the canvas turns any colour, color-mix too, into numbers
  const context = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], below) =>
    [r * a + below[0] * (1 - a), g * a + below[1] * (1 - a), b * a + below[2] * (1 - a), 1];
  const ground = (one) => {
    const layers = [];
    for (let at = one; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((part) => (part / 255 <= 0.04045
      ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (const one of all) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())
      || one.matches('input, textarea, select');
    if (!own || one.matches(':disabled, [disabled] *, [aria-hidden=true] *') || one.closest('.hidden, .skip')) continue;
    const style = getComputedStyle(one);
    const below = ground(one);
    const [high, low] = [luminance(over(rgba(style.color), below)), luminance(below)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5))
      found.push(`contrast ${ratio.toFixed(2)}: ${short(one)} ${one.textContent.slice(0, 30)}`);
  }

  // what scrolls can be reached
  for (const one of all) {
    const style = getComputedStyle(one);
    if (!/(auto|scroll)/.test(style.overflow) || (one.scrollHeight <= one.clientHeight + 1
      && one.scrollWidth <= one.clientWidth + 1)) continue;
    if (one.tabIndex < 0 && !one.querySelector('button, a[href], input, select, textarea, [tabindex="0"]'))
      found.push(`scrolls out of reach: ${short(one)}`);
  }
  return found;
})()"""

"use strict";
// Reads out the values under the pointer, and moves the map of loads through time.  Without it the page shows all the same.
(() => {
  const text = (value, percent) => percent ? Number((100 * value).toPrecision(4)) + "%" : Number(value.toPrecision(5));
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const source = plot.querySelector("script");
    if (!source) continue;
    let data = null, rule = null, tip = null;
    const leave = () => { if (tip) { tip.hidden = rule.hidden = true; } };
    const move = (event) => {
      if (!data) {
        data = JSON.parse(source.textContent);
        rule = plot.appendChild(Object.assign(document.createElement("div"), { className: "rule" }));
        tip = plot.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
        tip.setAttribute("aria-hidden", "true");
      }
      const svg = plot.querySelector("svg"), place = svg.getBoundingClientRect();
      const scale = place.width / svg.viewBox.baseVal.width, [left, top, right, bottom] = data.box;
      const share = ((event.clientX - place.left) / scale - left) / (right - left);
      if (share < 0 || share > 1) return leave();
      const x = data.x[0] + share * (data.x[1] - data.x[0]);
      const first = data.lines[0], step = first.x[nearest(first.x, x)];
      tip.replaceChildren("step " + Math.round(step).toLocaleString("en"));
      for (const line of data.lines) {
        const i = nearest(line.x, x), row = document.createElement("div"), name = document.createElement("b");
        name.style.color = "var(--line" + line.c + ")";
        name.textContent = line.n + " ";
        row.append(name, text(line.y[i], data.percent));
        if (line.lo) row.append(" (" + text(line.lo[i], data.percent) + " to " + text(line.hi[i], data.percent) + ")");
        // A run that has ended, or an evaluation some way off, is not at this step.
        if (Math.abs(line.x[i] - step) > 0.02 * (data.x[1] - data.x[0])) {
          row.append(" at step " + Math.round(line.x[i]).toLocaleString("en"));
        }
        tip.append(row);
      }
      const at = (left + (step - data.x[0]) / (data.x[1] - data.x[0]) * (right - left)) * scale;
      Object.assign(rule.style, { left: at + "px", top: top * scale + "px", height: (bottom - top) * scale + "px" });
      tip.hidden = rule.hidden = false;
      const room = place.width - tip.offsetWidth;
      tip.style.left = Math.max(0, Math.min(room, at > place.width / 2 ? at - tip.offsetWidth - 8 : at + 8)) + "px";
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", leave);
  }
  for (const player of document.querySelectorAll(".player")) {
    const labels = player.dataset.labels.split("|"), input = player.querySelector("input");
    const frame = player.querySelector(".frame"), output = player.querySelector("output");
    const show = () => {
      const at = Number(input.value);
      frame.style.backgroundPosition = "0 " + (labels.length > 1 ? 100 * at / (labels.length - 1) : 0) + "%";
      output.textContent = labels[at];
      input.setAttribute("aria-valuetext", labels[at]);
    };
    input.addEventListener("input", show);
    show();
  }
})();

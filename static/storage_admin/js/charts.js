// Draws each <canvas data-chart="ID"> from the configuration that the server put into the JSON element of that id.
"use strict";

(() => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const drawn = new Map();

  function size(bytes) {
    let value = Math.abs(bytes);
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) {
      value /= 1024;
      unit += 1;
    }
    const digits = value >= 100 || unit === 0 ? 0 : value >= 10 ? 1 : 2;
    return `${bytes < 0 ? "−" : ""}${Number(value.toFixed(digits))} ${units[unit]}`;
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function moment(seconds) {
    return new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
  }

  // Ticks at whole binary sizes and at whole days or hours.
  function steps(config) {
    const points = config.data.datasets.flatMap((set) => set.data);
    const tops = Math.max(...points.map((point) => point.y), 1);
    const size = 2 ** Math.ceil(Math.log2(tops / 5));
    const from = Math.min(...points.map((point) => point.x));
    const to = Math.max(...points.map((point) => point.x));
    const time = [60, 600, 3600, 6 * 3600, 86400].find((unit) => (to - from) / unit <= 8) || 86400;
    return { size, from, to, time: time * Math.max(1, Math.ceil((to - from) / time / 6)) };
  }

  function draw(canvas) {
    const config = JSON.parse(document.getElementById(canvas.dataset.chart).textContent);
    const muted = colour("--sa-muted");
    const step = steps(config);
    for (const set of config.data.datasets) {
      set.borderColor = colour(set.colour);
      set.backgroundColor = `${colour(set.colour)}26`;
    }
    config.options.animation = false;
    config.options.maintainAspectRatio = false;
    config.options.interaction = { mode: "index", intersect: false };
    config.options.plugins = {
      legend: { position: "bottom", labels: { color: muted, boxWidth: 24, boxHeight: 2 } },
      tooltip: {
        callbacks: {
          title: (items) => `${moment(items[0].parsed.x)} UTC`,
          label: (item) => `${item.dataset.label}: ${size(item.parsed.y)}`,
        },
      },
    };
    Object.assign(config.options.scales.x, { min: step.from, max: step.to });
    config.options.scales.x.ticks = {
      color: muted,
      stepSize: step.time,
      includeBounds: false,
      maxRotation: 0,
      callback: (value) => (step.time < 86400 ? moment(value).slice(5) : moment(value).slice(0, 10)),
    };
    config.options.scales.y.ticks = { color: muted, stepSize: step.size, callback: (value) => size(value) };
    for (const axis of Object.values(config.options.scales)) axis.grid = { color: colour("--sa-line") };
    if (drawn.has(canvas)) drawn.get(canvas).destroy();
    drawn.set(canvas, new window.Chart(canvas, config));
  }

  function all() {
    for (const canvas of document.querySelectorAll("canvas[data-chart]")) draw(canvas);
  }

  document.addEventListener("DOMContentLoaded", all);
  document.addEventListener("theme", () => { if (drawn.size) all(); });
})();

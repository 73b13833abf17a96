// Draws each <canvas data-chart="ID"> from the configuration that the server put into the JSON element of that id.
// Beside Chart.js's own keys it knows: unit (of all figures), and of a dataset colour, spread, published, dropped, about.
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

  function time(seconds) {
    if (seconds === 0) return "0 s";
    const [factor, name] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${Number((seconds * factor).toPrecision(3)).toLocaleString("en")} ${name}`;
  }

  // A figure in the unit of its chart; a chart without one shows bytes.
  function figure(value, unit = "B") {
    if (unit === "B") return size(value);
    if (unit === "B/s") return `${size(value)}/s`;
    if (unit === "s") return time(value);
    const count = value >= 100 ? Math.round(value) : Number(value.toPrecision(3));
    return unit === "1/s" ? `${count.toLocaleString("en")}/s` : `${count.toLocaleString("en")} ${unit}`;
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // The zone of the page's other times; UTC where the browser does not know it.
  const [zone, parts] = (() => {
    const shape = { hourCycle: "h23", year: "numeric", month: "numeric", day: "numeric", hour: "numeric",
      minute: "numeric", second: "numeric" };
    for (const timeZone of [document.documentElement.dataset.zone, "UTC"]) {
      try {
        return [timeZone, new Intl.DateTimeFormat("en", { ...shape, timeZone })];
      } catch { /* the next one */ }
    }
  })();

  // By how many seconds the zone's clocks are ahead of UTC at a moment.
  function ahead(seconds) {
    const told = parts.formatToParts(seconds * 1000).map(({ type, value }) => [type, Number(value)]);
    const { year, month, day, hour, minute, second } = Object.fromEntries(told);
    return Date.UTC(year, month - 1, day, hour, minute, second) / 1000 - Math.floor(seconds);
  }

  function iso(seconds) {
    return new Date(seconds * 1000).toISOString();
  }

  function moment(seconds) {
    return iso(seconds + ahead(seconds)).slice(0, 16).replace("T", " ");
  }

  // Two moments that clocks which are put back show alike are told apart.
  function exactly(seconds) {
    if (zone === "UTC") return `${moment(seconds)} UTC`;
    const by = ahead(seconds);
    return `${moment(seconds)} ${by < 0 ? "-" : "+"}${iso(Math.abs(by)).slice(11, 16)}`;
  }

  // The moment at which the zone's clocks show a time, which is given as if it were UTC's.
  function shownAt(wall) {
    return wall - ahead(wall - ahead(wall));
  }

  function values(config) {
    return config.data.datasets.flatMap((set) =>
      set.data.map((point) => (point !== null && typeof point === "object" ? point.y : point)));
  }

  function tops(config) {
    const drawnValues = values(config);
    const spreads = config.data.datasets.flatMap((set) => (set.spread || []).map((pair) => (pair ? pair[1] : 0)));
    return Math.max(...drawnValues, ...spreads, 0);
  }

  // Ticks at whole days or hours of the zone's clocks.
  function overTime(config) {
    const points = config.data.datasets.flatMap((set) => set.data);
    const from = Math.min(...points.map((point) => point.x));
    const to = Math.max(...points.map((point) => point.x));
    const unit = [60, 600, 3600, 6 * 3600, 86400].find((length) => (to - from) / length <= 8) || 86400;
    const step = unit * Math.max(1, Math.ceil((to - from) / unit / 6));
    const few = to - from < 2 * step;
    const ticks = new Set(few ? [from, to] : []);
    for (let wall = Math.ceil((from + ahead(from)) / step) * step; !few && shownAt(wall) <= to; wall += step) {
      if (shownAt(wall) >= from) ticks.add(shownAt(wall));
    }
    Object.assign(config.options.scales.x, {
      min: from,
      max: to,
      title: { display: true, text: zone, color: colour("--sa-muted") },
      afterBuildTicks: (axis) => { axis.ticks = [...ticks].map((value) => ({ value })); },
    });
    return {
      maxRotation: 0,
      callback: (value) => (step < 86400 ? moment(value).slice(5) : moment(value).slice(0, 10)),
    };
  }

  // A name of several words in lines of some letters each: it stands upright where it would lie aslant.
  function inLines(name, most) {
    return name.split(" ").reduce((lines, word) => {
      const last = lines.at(-1);
      if (last !== undefined && last.length + word.length < most) return [...lines.slice(0, -1), `${last} ${word}`];
      return [...lines, word];
    }, []);
  }

  // A logarithmic axis names its powers of ten; where it has few of them, what lies between as well.
  function powers(unit) {
    return (value, _index, ticks) => {
      const wide = ticks.at(-1).value / ticks[0].value > 300;
      const digit = Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9));
      return digit === 1 || (!wide && (digit === 2 || digit === 5)) ? figure(value, unit) : "";
    };
  }

  // A size has ticks at binary steps, everything else where Chart.js likes.
  function upwards(config) {
    const axis = config.options.scales.y;
    const top = tops(config);
    const bytes = !config.unit || config.unit.startsWith("B");
    axis.suggestedMax = top;
    if (axis.type === "logarithmic") return { callback: powers(config.unit) };
    const ticks = { callback: (value) => figure(value, config.unit) };
    const reach = top - Math.min(...values(config), 0);
    return bytes ? { stepSize: 2 ** Math.ceil(Math.log2(Math.max(reach, 1) / 5)), ...ticks } : ticks;
  }

  // What was measured elsewhere is hatched, so that it is told apart without its colour.
  function hatch(line) {
    const tile = document.createElement("canvas");
    tile.width = 8;
    tile.height = 8;
    const pen = tile.getContext("2d");
    pen.strokeStyle = line;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const from of [-8, 0, 8]) {
      pen.moveTo(from, 8);
      pen.lineTo(from + 8, 0);
    }
    pen.stroke();
    return pen.createPattern(tile, "repeat");
  }

  function paint(set, kind) {
    const line = colour(set.colour);
    set.borderColor = line;
    set.backgroundColor = set.published ? hatch(line) : kind === "bar" ? `${line}b0` : `${line}26`;
    if (kind === "bar") Object.assign(set, { borderWidth: 1, maxBarThickness: 64 });
  }

  // The least and the largest repetition, as a whisker on the median.
  const whiskers = {
    id: "whiskers",
    afterDatasetsDraw(chart) {
      const pen = chart.ctx;
      pen.save();
      const plain = colour("--tblr-body-color") || colour("--sa-muted");
      pen.lineWidth = 1;
      chart.data.datasets.forEach((set, at) => {
        if (!set.spread || !chart.isDatasetVisible(at)) return;
        // Lines have theirs at the same place: each is told by its colour.
        pen.strokeStyle = chart.config.type === "line" ? set.borderColor : plain;
        chart.getDatasetMeta(at).data.forEach((shape, index) => {
          const pair = set.spread[index];
          if (!pair || pair[0] === null || pair[0] === pair[1]) return;
          const [low, high] = pair.map((value) => chart.scales.y.getPixelForValue(value));
          pen.beginPath();
          pen.moveTo(shape.x, low);
          pen.lineTo(shape.x, high);
          for (const end of [low, high]) {
            pen.moveTo(shape.x - 4, end);
            pen.lineTo(shape.x + 4, end);
          }
          pen.stroke();
        });
      });
      pen.restore();
    },
  };

  function told(item, unit) {
    const set = item.dataset;
    const pair = set.spread && set.spread[item.dataIndex];
    const spread = pair && pair[0] !== pair[1] ? ` (${figure(pair[0], unit)} to ${figure(pair[1], unit)})` : "";
    const dropped = set.dropped && set.dropped[item.dataIndex] ? ", dropped" : "";
    return `${set.label}: ${figure(item.parsed.y, unit)}${spread}${dropped}`;
  }

  function plugins(config, muted) {
    const bars = config.type === "bar";
    const labels = { color: muted, boxWidth: bars ? 14 : 24, boxHeight: bars ? 10 : 2 };
    const title = (items) => (bars ? items[0].label : exactly(items[0].parsed.x));
    return {
      legend: { position: "bottom", labels },
      tooltip: {
        callbacks: {
          title,
          label: (item) => told(item, config.unit),
          afterLabel: (item) => item.dataset.about || "",
        },
      },
    };
  }

  function names(config) {
    const { labels } = config.data;
    return { autoSkip: false, callback: (_value, index) => inLines(labels[index], labels.length > 3 ? 9 : 12) };
  }

  function draw(canvas) {
    const config = JSON.parse(document.getElementById(canvas.dataset.chart).textContent);
    const muted = colour("--sa-muted");
    const scales = config.options.scales;
    for (const set of config.data.datasets) paint(set, config.type);
    Object.assign(config.options, { animation: false, maintainAspectRatio: false });
    config.options.interaction = { mode: "index", intersect: false };
    config.options.plugins = plugins(config, muted);
    scales.x.ticks = { color: muted, ...(scales.x.type === "linear" ? overTime(config) : names(config)) };
    scales.y.ticks = { color: muted, ...upwards(config) };
    for (const axis of Object.values(scales)) axis.grid = { color: colour("--sa-line") };
    config.plugins = [whiskers];
    if (drawn.has(canvas)) drawn.get(canvas).destroy();
    drawn.set(canvas, new window.Chart(canvas, config));
  }

  function all() {
    for (const canvas of document.querySelectorAll("canvas[data-chart]")) draw(canvas);
  }

  // A fragment brought new charts, and took old ones away.
  function swapped() {
    for (const [canvas, chart] of drawn) {
      if (canvas.isConnected) continue;
      chart.destroy();
      drawn.delete(canvas);
    }
    for (const canvas of document.querySelectorAll("canvas[data-chart]")) if (!drawn.has(canvas)) draw(canvas);
  }

  document.addEventListener("DOMContentLoaded", all);
  document.addEventListener("htmx:afterSettle", swapped);
  document.addEventListener("theme", () => { if (drawn.size) all(); });
})();

"use strict";
/* Draws the charts and matrices of a report and sorts its tables. The page is complete without it, as tables and text. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  // Paper is laid out after charts are drawn for it, so they have a size of their own there, which the style fits into
  // their column: half the width of a page, in twice as many pixels. A confusion matrix has the whole width.
  const PAPER = { chart: 340, high: 210, matrix: 560, fine: 2 };

  // Okabe and Ito's colours, which people with any colour vision tell apart; lighter ones on dark paper.
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6f6f00", "#555555"];
  const DARK = ["#56b4e9", "#ff8f3f", "#2cc295", "#e59ac4", "#f0b93a", "#9fd6ff", "#f0e442", "#c0c0c0"];
  const isDark = () => dark.matches && !printing;
  const colours = () => (isDark() ? DARK : LIGHT);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ink = () => (printing ? "#444444" : style("--soft"));
  const grid = () => (printing ? "#cccccc" : style("--line"));

  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return size !== 0 && size < 1e-4 ? value.toExponential(2) : String(+value.toPrecision(4));
  };

  /* Charts. */

  const several = data.charts.some((chart) => chart.curves.some((curve) => curve.run > 0));
  const roles = ["validation", "training", "average"];
  const HIGH = 250;
  const drawn = new Map();
  const logs = new Set();

  const stroke = (curve) => {
    const all = colours();
    return several ? all[curve.run % all.length] : all[roles.indexOf(curve.role)];
  };
  /* Epochs are counted whole, unless there is only a part of one to show. */
  const isWhole = (epochs) => epochs[epochs.length - 1] - epochs[0] >= 1 || epochs.every(Number.isInteger);
  /* In points: the chart library takes them as pixels, of which a fine screen, such as a phone's, has several per point. */
  const DASHES = { training: [5, 4], average: [2, 2] };
  const dashes = (curve, fine) => (DASHES[curve.role] || []).map((length) => length * fine * devicePixelRatio);

  const options = (chart, width) => {
    const isLog = logs.has(chart.key), fine = printing ? PAPER.fine : 1, font = `${11 * fine}px system-ui`;
    const whole = () => [0, 100];
    const padded = (_, low, high) => {
      if (low === null) return [0, 1];
      const [begin, end] = uPlot.rangeNum(chart.zero ? 0 : low, high, 0.1, true);
      return chart.unit === "%" ? [Math.max(0, begin), Math.min(100, end)] : [chart.zero ? 0 : begin, end];
    };
    const axis = (label, extra) => ({
      stroke: ink, grid: { stroke: grid, width: fine }, ticks: { stroke: grid, width: fine, size: 10 * fine }, gap: 5 * fine,
      label: label || undefined, labelSize: label ? 18 * fine : 0, labelFont: font, font, ...extra,
    });
    /* As wide as its longest number, so that 0.00025 is not cut. */
    const wide = (made, shown, number, round) => {
      const own = made.axes[number];
      if (round > 1) return own._size;
      made.ctx.font = own.font[0];
      const longest = Math.max(0, ...(shown || []).map((each) => made.ctx.measureText(each).width)) / devicePixelRatio;
      return Math.max(58 * fine, Math.ceil(longest + own.ticks.size + own.gap));
    };
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick)));
    const scales = { x: { time: false }, y: isLog ? { distr: 3 } : { range: padded } };
    const incrs = isWhole(chart.data[0]) ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000] } : {};
    const axes = [
      axis("", { size: 50 * fine, space: 50 * fine, values: (_, ticks) => ticks.map((tick) => short(tick)), ...incrs }),
      axis(chart.unit, { size: wide, space: 30 * fine, values }),
    ];
    if (chart.right) {
      scales.y2 = { range: chart.share ? whole : padded };
      axes.push(axis(chart.right, { scale: "y2", side: 1, size: 54 * fine, space: 30 * fine, values, grid: { show: false } }));
    }
    return {
      width: width * fine, height: (printing ? PAPER.high : HIGH) * fine, scales, axes, cursor: { sync: { key: "falconet" }, focus: { prox: 24 }, points: { size: 6 } },
      focus: { alpha: several ? 0.35 : 1 }, legend: { live: true, markers: { dash: (_, number) => (chart.curves[number - 1]?.role === "training" ? "dashed" : chart.curves[number - 1]?.role === "average" ? "dotted" : "solid") } },
      series: [
        { label: "epoch", value: (_, value) => short(value) },
        ...chart.curves.map((curve) => ({
          label: curve.label, scale: curve.right ? "y2" : "y", stroke: () => stroke(curve), width: 2 * fine,
          dash: dashes(curve, fine), spanGaps: true, value: (_, value) => short(value),
          points: { show: chart.data[0].length <= 40, size: 5 * fine },
        })),
      ],
    };
  };

  /* The part of the epochs that a reader has enlarged; null: all are shown. */
  const zoomed = (made) => {
    const { min, max } = made.scales.x, epochs = made.data[0];
    return min > epochs[0] || max < epochs[epochs.length - 1] ? { min, max } : null;
  };

  const draw = (chart) => {
    const place = document.getElementById(`chart-${chart.key}`);
    if (!place) return;
    const old = drawn.get(chart.key), zoom = old && zoomed(old), hidden = old ? old.series.map((each) => !each.show) : [];
    if (old) old.destroy();
    const made = new uPlot(options(chart, printing ? PAPER.chart : Math.max(200, place.clientWidth)), chart.data, place);
    if (zoom) made.setScale("x", zoom);
    hidden.forEach((isHidden, number) => { if (isHidden && number) made.setSeries(number, { show: false }); });
    for (const row of made.root.querySelectorAll(".u-legend .u-series")) {
      const name = row.querySelector("th");
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); name.click(); }
      });
    }
    drawn.set(chart.key, made);
  };
  const drawAll = () => data.charts.forEach(draw);

  const listenToCharts = () => {
    for (const chart of data.charts) {
      const place = document.getElementById(`chart-${chart.key}`);
      if (!place) continue;
      let at = -1;
      place.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
        if (!step || event.target !== place) return;
        event.preventDefault();
        const made = drawn.get(chart.key), last = chart.data[0].length - 1;
        at = Math.min(last, Math.max(0, at + step));
        made.setCursor({ left: made.valToPos(chart.data[0][at], "x"), top: 10 });
      });
    }
    for (const button of document.querySelectorAll("button.log")) {
      const key = button.dataset.chart;
      button.setAttribute("aria-pressed", String(logs.has(key)));
      button.addEventListener("click", () => {
        if (!logs.delete(key)) logs.add(key);
        button.setAttribute("aria-pressed", String(logs.has(key)));
        draw(data.charts.find((chart) => chart.key === key));
      });
    }
  };

  /* Points that were added to charts which are drawn; false: the charts are not the same ones. */
  const grow = (charts) => {
    const shape = (all) => JSON.stringify(all.map((chart) => [chart.key, chart.right, chart.curves]));
    if (shape(charts) !== shape(data.charts)) return false;
    charts.forEach((chart, number) => {
      const old = data.charts[number], made = drawn.get(chart.key), zoom = zoomed(made);
      const looks = (epochs) => [epochs.length <= 40, isWhole(epochs)].join();
      const isAlike = looks(old.data[0]) === looks(chart.data[0]);
      Object.assign(old, chart);
      if (!isAlike) return draw(old);
      made.setData(old.data, !zoom);
      if (zoom) made.setScale("x", zoom);
    });
    return true;
  };

  const drawAnew = (charts) => {
    drawn.forEach((made) => made.destroy());
    drawn.clear();
    data.charts = charts;
    drawAll();
    listenToCharts();
  };

  /* Confusion matrices: a row for each class, its cells by the share of its images; the diagonal is right. */

  class Matrix {
    constructor(place, content) {
      this.place = place;
      this.names = content.names;
      this.count = content.names.length;
      this.images = content.images;
      this.rows = new Map();
      for (let i = 0; i < content.cells.length; i += 3) {
        const [label, predicted, images] = content.cells.slice(i, i + 3);
        if (!this.rows.has(label)) this.rows.set(label, new Map());
        this.rows.get(label).set(predicted, images);
      }
      this.canvas = document.createElement("canvas");
      place.append(this.canvas);
      this.output = place.parentElement.querySelector("output");
      this.cursor = null;
      this.least = Math.min(6, this.count);  // classes that are left when it is enlarged most
      const whole = () => this.span >= this.count;
      const idle = { in: () => this.span <= this.least, out: whole, all: whole };
      this.tools = [...place.parentElement.querySelectorAll("[data-zoom]")].map((button) => [button, idle[button.dataset.zoom]]);
      this.reset();
      this.listen();
    }

    reset() { this.span = this.count; this.left = 0; this.top = 0; }

    margin(paint) {
      if (this.span > 40) return 10;
      paint.font = "11px system-ui";
      const first = [Math.floor(this.top), Math.floor(this.left)];
      const names = first.flatMap((at) => this.names.slice(at, at + Math.ceil(this.span) + 1));
      const widest = Math.max(...names.map((name) => paint.measureText(name).width));
      return Math.min(widest + 12, this.side * 0.28);
    }

    draw() {
      const ratio = Math.max(printing ? PAPER.fine : 1, devicePixelRatio || 1);
      this.side = printing ? PAPER.matrix : this.place.clientWidth;
      const edge = this.margin(this.canvas.getContext("2d"));
      const full = Math.min(this.side - edge - 4, printing ? PAPER.matrix : Math.max(240, 0.75 * innerHeight));
      this.high = full + edge + 8;
      this.place.style.height = `${this.high}px`;
      this.canvas.width = this.side * ratio;
      this.canvas.height = this.high * ratio;
      const paint = this.canvas.getContext("2d");
      paint.setTransform(ratio, 0, 0, ratio, 0, 0);
      paint.clearRect(0, 0, this.side, this.high);
      this.size = full / this.span;
      this.edge = edge;
      const least = Math.max(this.size, 1.6);  // a thousand classes: still a visible dot
      const [right, wrong] = isDark() ? ["86,180,233", "255,143,63"] : ["0,114,178", "213,94,0"];
      paint.fillStyle = printing ? "#f6f7f9" : style("--raised");
      paint.fillRect(edge, 4, full, full);
      paint.save();
      paint.beginPath();
      paint.rect(edge, 4, full, full);
      paint.clip();
      let marks = 0;
      const first = Math.floor(this.top), last = Math.min(this.count, Math.ceil(this.top + this.span));
      for (let label = first; label < last; label++) {
        for (const [predicted, images] of this.rows.get(label) || []) {
          if (predicted < this.left - 1 || predicted > this.left + this.span) continue;
          const share = images / Math.max(1, this.images[label]);
          paint.fillStyle = `rgba(${label === predicted ? right : wrong},${0.12 + 0.88 * Math.sqrt(share)})`;
          const gap = this.size > 6 ? 1 : 0;
          paint.fillRect(edge + (predicted - this.left) * this.size, 4 + (label - this.top) * this.size, least - gap, least - gap);
          marks += 1;
          if (this.size >= 26) {
            paint.fillStyle = share > 0.35 ? (isDark() ? "#000000" : "#ffffff") : printing ? "#000000" : style("--ink");
            paint.font = "11px system-ui";
            paint.textAlign = "center";
            paint.textBaseline = "middle";
            paint.fillText(images.toLocaleString("en"), edge + (predicted - this.left + 0.5) * this.size, 4 + (label - this.top + 0.5) * this.size);
          }
        }
      }
      if (this.cursor) {
        paint.strokeStyle = printing ? "#000000" : style("--ink");
        paint.lineWidth = 2;
        paint.strokeRect(edge + (this.cursor[1] - this.left) * this.size, 4 + (this.cursor[0] - this.top) * this.size, least, least);
      }
      paint.restore();
      this.place.dataset.marks = String(marks);
      // One finger scrolls the page until there is a part to move; two always zoom here.
      this.place.style.touchAction = this.span < this.count ? "none" : "pan-x pan-y";
      this.tools.forEach(([button, isIdle]) => button.setAttribute("aria-disabled", String(isIdle())));  // it keeps the focus
      if (this.size >= 9 && edge > 10) this.label(paint, edge, full);
    }

    label(paint, edge, full) {
      paint.fillStyle = ink();
      paint.font = "11px system-ui";
      const fit = (name) => {
        let text = name;
        while (text.length > 1 && paint.measureText(text).width > edge - 10) text = `${text.slice(0, -2)}…`;
        return text;
      };
      for (let at = 0; at < this.span; at++) {
        const row = Math.floor(this.top) + at, column = Math.floor(this.left) + at;
        paint.textAlign = "right";
        paint.textBaseline = "middle";
        if (row < this.count) paint.fillText(fit(this.names[row]), edge - 6, 4 + (row - this.top + 0.5) * this.size);
        if (column < this.count) {
          paint.save();
          paint.translate(edge + (column - this.left + 0.5) * this.size, full + 10);
          paint.rotate(-Math.PI / 2);
          paint.fillText(fit(this.names[column]), 0, 0);
          paint.restore();
        }
      }
    }

    point(event) {
      const box = this.canvas.getBoundingClientRect();
      return [this.top + (event.clientY - box.top - 4) / this.size, this.left + (event.clientX - box.left - this.edge) / this.size];
    }

    at(event) {
      const [row, column] = this.point(event).map(Math.floor);
      if (row < 0 || column < 0 || row >= this.count || column >= this.count) return null;
      if (this.size >= 4) return [row, column];
      // Too small to point at: the largest cell near by.
      let found = [row, column], most = -1;
      const reach = Math.ceil(3 / this.size);
      for (let label = row - reach; label <= row + reach; label++) {
        for (const [predicted, images] of this.rows.get(label) || []) {
          if (Math.abs(predicted - column) <= reach && images > most) { found = [label, predicted]; most = images; }
        }
      }
      return found;
    }

    tell(cell) {
      if (!cell) return;
      this.cursor = cell;
      const [label, predicted] = cell, of = this.images[label];
      const images = (this.rows.get(label) || new Map()).get(predicted) || 0;
      const share = of ? ` (${((100 * images) / of).toFixed(1)} %)` : "";
      const verb = label === predicted ? "recognised" : `taken for ${this.names[predicted]}`;
      this.output.textContent = `${this.names[label]} ${verb}: ${images.toLocaleString("en")} of ${of.toLocaleString("en")}${share}`;
      this.draw();
    }

    zoom(factor, row, column) {
      const span = Math.min(this.count, Math.max(this.least, this.span * factor));
      const [y, x] = [row ?? this.top + this.span / 2, column ?? this.left + this.span / 2];
      this.top = y - ((y - this.top) * span) / this.span;
      this.left = x - ((x - this.left) * span) / this.span;
      this.span = span;
      this.clamp();
      this.draw();
    }

    clamp() {
      const most = this.count - this.span;
      this.top = Math.min(most, Math.max(0, this.top));
      this.left = Math.min(most, Math.max(0, this.left));
    }

    listen() {
      const place = this.place, touching = new Map();
      let grabbed = null, pinched = 0;
      const spread = () => {
        const [[x, y], [other, below]] = [...touching.values()];
        return [Math.max(20, Math.hypot(other - x, below - y)), { clientX: (x + other) / 2, clientY: (y + below) / 2 }];
      };
      place.addEventListener("pointerdown", (event) => {
        touching.set(event.pointerId, [event.clientX, event.clientY]);
        grabbed = touching.size === 1 ? [event.clientX, event.clientY, this.left, this.top] : null;
        if (touching.size === 2) [pinched] = spread();
        if (event.pointerType === "touch") this.tell(this.at(event));
      });
      place.addEventListener("pointermove", (event) => {
        if (touching.has(event.pointerId)) touching.set(event.pointerId, [event.clientX, event.clientY]);
        if (touching.size === 2) {
          const [apart, middle] = spread();
          this.zoom(pinched / apart, ...this.point(middle));
          pinched = apart;
        } else if (grabbed && event.buttons && this.span < this.count) {
          this.left = grabbed[2] - (event.clientX - grabbed[0]) / this.size;
          this.top = grabbed[3] - (event.clientY - grabbed[1]) / this.size;
          this.clamp();
          this.draw();
        } else this.tell(this.at(event));
      });
      const released = (event) => { touching.delete(event.pointerId); grabbed = null; };
      for (const name of ["pointerup", "pointercancel"]) addEventListener(name, released);
      place.addEventListener("dblclick", (event) => { const cell = this.at(event); if (cell) this.zoom(0.4, cell[0] + 0.5, cell[1] + 0.5); });
      place.addEventListener("wheel", (event) => {
        if (this.count <= this.least) return;
        const cell = this.at(event), out = event.deltaY > 0;
        if (!cell || (out && this.span >= this.count)) return;  // let the page scroll
        event.preventDefault();
        this.zoom(out ? 1.25 : 0.8, cell[0] + 0.5, cell[1] + 0.5);
      }, { passive: false });
      place.addEventListener("keydown", (event) => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (move) {
          const [row, column] = this.cursor || [Math.floor(this.top), Math.floor(this.left)];
          const next = [row + move[0], column + move[1]].map((value) => Math.min(this.count - 1, Math.max(0, value)));
          this.top = Math.min(next[0], Math.max(this.top, next[0] + 1 - this.span));
          this.left = Math.min(next[1], Math.max(this.left, next[1] + 1 - this.span));
          this.tell(next);
        } else if (event.key === "+" || event.key === "=") this.zoom(0.6, ...(this.cursor || []));
        else if (event.key === "-") this.zoom(1.6, ...(this.cursor || []));
        else if (event.key === "0") { this.reset(); this.draw(); }
        else return;
        event.preventDefault();
      });
      for (const [button] of this.tools) {
        button.addEventListener("click", () => {
          if (button.dataset.zoom === "all") { this.reset(); this.draw(); }
          else this.zoom(button.dataset.zoom === "in" ? 0.5 : 2);
        });
      }
    }
  }

  let matrices = [];
  const addMatrices = (all) => {
    const views = new Map(matrices.map((matrix) => [matrix.place.id, matrix]));
    matrices = [];
    for (const [key, content] of Object.entries(all)) {
      const place = document.getElementById(key), before = views.get(key);
      if (!place || !content.names.length) continue;
      const matrix = new Matrix(place, content);
      if (before && before.count === matrix.count) [matrix.span, matrix.left, matrix.top, matrix.cursor] = [before.span, before.left, before.top, before.cursor];
      matrices.push(matrix);
    }
  };
  const drawMatrices = () => matrices.forEach((matrix) => { if (matrix.place.clientWidth) matrix.draw(); });

  /* Tables. */

  const sort = (table, column, ascending) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.by ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)], byNumber = Number(x) - Number(y);
      return Number.isNaN(byNumber) ? x.localeCompare(y, undefined, { numeric: true }) : byNumber;
    };
    const rows = [...table.tBodies[0].rows].sort((a, b) => (ascending ? compare(a, b) : compare(b, a)));
    table.tBodies[0].append(...rows);
  };

  /* Lets the tables and folded parts below an element answer to clicks. */
  const listen = (root) => {
    for (const table of root.querySelectorAll("table.sorts")) {
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        head.querySelector("button")?.addEventListener("click", () => {
          const now = head.getAttribute("aria-sort");
          sort(table, column, now === "none" ? !head.classList.contains("number") : now === "descending");
        });
      });
    }
    for (const each of root.querySelectorAll("details")) each.addEventListener("toggle", drawMatrices);
  };

  /* Sizes, colours and paper. */

  drawAll();
  listenToCharts();
  addMatrices(data.matrices);
  drawMatrices();
  listen(document);
  let width = document.documentElement.clientWidth;
  new ResizeObserver(() => {
    if (printing || document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    for (const [key, made] of drawn) {
      made.setSize({ width: Math.max(200, document.getElementById(`chart-${key}`).clientWidth), height: HIGH });
    }
    drawMatrices();
  }).observe(document.documentElement);
  dark.addEventListener("change", () => { drawAll(); drawMatrices(); });
  addEventListener("beforeprint", () => { printing = true; drawAll(); drawMatrices(); });
  addEventListener("afterprint", () => { printing = false; drawAll(); drawMatrices(); });
  document.documentElement.dataset.ready = "true";
  globalThis.report = { data, drawAnew, grow, listen, sort, showMatrices: (all) => { addMatrices(all); drawMatrices(); } };
})();

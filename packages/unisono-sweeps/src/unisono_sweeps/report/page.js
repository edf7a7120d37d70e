// Draws the charts of a report from the JSON in the page. Everything that comes from data is set as text.
"use strict";
const NS = "http://www.w3.org/2000/svg";
const MOST_SHOWN = 3, MOST_READ = 8;  // curves whose values are shown at the pointer, and by the arrow keys
const MOST_ROWS = 25, MOST_COLUMNS = 12;  // of the table of a chart
const W = 560, H = 300, LEFT = 78, RIGHT = 24, TOP = 10, BOTTOM = 46;

function make(parent, name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function format(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(digits)));
}

function ticks(low, high, log) {
  if (log) {
    const found = [];
    const every = Math.max(1, Math.ceil((high - low) / 6));
    for (let power = Math.ceil(low); power <= high; power += every) found.push(power);
    return found.length > 1 ? found : [low, (low + high) / 2, high];
  }
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
  return found;
}

function chart(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  const logs = {x: Boolean(data.logx), y: Boolean(data.logy)};
  let zoom = null, drag = null, cursor = null, shown = [], spans = null;

  const scale = (value, axis) => logs[axis] ? (value > 0 ? Math.log10(value) : null) : value;
  const place = (value, axis) => {
    const at = scale(value, axis);
    if (value === null || at === null) return null;
    const [low, high] = spans[axis], share = (at - low) / (high - low);
    return axis === "x" ? LEFT + share * (W - LEFT - RIGHT) : H - BOTTOM - share * (H - TOP - BOTTOM);
  };
  const inside = x => zoom === null || (x >= zoom[0] && x <= zoom[1]);

  function span(axis) {
    let low = Infinity, high = -Infinity;
    for (const one of data.series) one.x.forEach((x, n) => {
      if (!inside(x) || one.y[n] === null) return;
      const at = scale(axis === "x" ? x : one.y[n], axis);
      if (at !== null) { low = Math.min(low, at); high = Math.max(high, at); }
    });
    if (low > high) return [0, 1];
    if (axis === "x" && zoom !== null) {
      const ends = zoom.map(x => scale(x, "x"));
      if (ends[0] !== null) [low, high] = ends;
    }
    const room = high > low ? (axis === "y" || data.points ? (high - low) * 0.05 : 0) : Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  }

  function draw() {
    spans = {x: span("x"), y: span("y")};
    svg.replaceChildren();
    make(svg, "title", {}, data.title);
    for (const axis of ["x", "y"]) for (const at of ticks(...spans[axis], logs[axis])) {
      const value = logs[axis] ? 10 ** at : at, spot = place(value, axis);
      if (spot === null) continue;
      const line = axis === "x" ? {x1: spot, x2: spot, y1: TOP, y2: H - BOTTOM} : {x1: LEFT, x2: W - RIGHT, y1: spot, y2: spot};
      make(svg, "line", {...line, stroke: "var(--line)"});
      const where = axis === "x" ? {x: spot, y: H - BOTTOM + 18, "text-anchor": "middle"} : {x: LEFT - 6, y: spot + 4, "text-anchor": "end"};
      make(svg, "text", where, format(value, 4));
    }
    make(svg, "text", {x: (W + LEFT) / 2, y: H - 6, "text-anchor": "middle"}, data.xlabel);
    data.series.forEach(one => {
      let path = "", open = false;
      one.x.forEach((x, n) => {
        const px = inside(x) ? place(x, "x") : null, py = px === null || one.y[n] === null ? null : place(one.y[n], "y");
        if (py === null) { open = false; return; }
        if (data.points || one.x.length === 1) make(svg, "circle", {cx: px, cy: py, r: 4, fill: one.colour});
        path += `${open ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
        open = true;
      });
      if (!data.points) make(svg, "path", {d: path, fill: "none", stroke: one.colour, "stroke-width": 1.5});
    });
    if (cursor !== null) mark();
  }

  function mark() {
    const spot = place(cursor, "x");
    if (spot !== null) make(svg, "line", {x1: spot, x2: spot, y1: TOP, y2: H - BOTTOM, stroke: "var(--ink)", "stroke-dasharray": "3 3"});
    for (const [one, n] of shown) {
      const at = [place(one.x[n], "x"), place(one.y[n], "y")];
      if (!at.includes(null)) make(svg, "circle", {cx: at[0], cy: at[1], r: 6, fill: "none", stroke: "var(--ink)"});
    }
  }

  function nearest(one, x) {
    let best = 0;
    one.x.forEach((value, n) => { if (Math.abs(value - x) < Math.abs(one.x[best] - x)) best = n; });
    return best;
  }

  function closest(x, height) {
    const known = data.series.flatMap(one => (data.points ? one.x.map((_, n) => n) : [nearest(one, x)])
      .filter(n => one.y[n] !== null).map(n => [one, n]));
    const far = ([one, n]) => {
      const across = data.points ? (place(one.x[n], "x") ?? 1e9) - (place(x, "x") ?? 0) : 0;
      return Math.hypot(across, height === null ? 0 : (place(one.y[n], "y") ?? 1e9) - height);
    };
    if (height !== null || data.points) known.sort((a, b) => far(a) - far(b));
    return known.slice(0, data.points ? 1 : height === null ? MOST_READ : MOST_SHOWN);
  }

  function show(x, height = null) {
    cursor = x;
    shown = closest(x, height);
    const parts = shown.map(([one, n]) => {
      return `${data.points && one.names.length ? one.names[n] : one.name}: ${format(one.y[n])} at ${format(one.x[n])}`;
    });
    const rest = data.points ? 0 : data.series.length - parts.length;
    output.textContent = parts.join("; ") + (rest > 0 ? `; and ${rest} more` : "");
    draw();
  }

  function cell(row, tag, text) {
    const node = document.createElement(tag);
    node.textContent = text;
    if (tag === "th") node.scope = "col";
    row.appendChild(node);
  }

  function tabulate(details) {
    const frame = document.createElement("div"), table = document.createElement("table"), columns = data.series.slice(0, MOST_COLUMNS);
    const first = data.points ? columns[0].x : columns.reduce((a, b) => b.x.length > a.x.length ? b : a).x;
    const every = Math.max(1, Math.ceil(first.length / MOST_ROWS));
    const kept = data.points ? first.map((_, n) => n) : first.map((_, n) => n).filter(n => n % every === 0 || n === first.length - 1);
    const caption = table.createCaption(), head = table.createTHead().insertRow(), body = table.createTBody();
    const left = data.series.length - columns.length;
    caption.textContent = `${data.title}, ${kept.length} of ${first.length} values` + (left ? `, of ${columns.length} of ${data.series.length} lines` : "");
    if (data.points) cell(head, "th", "run");
    cell(head, "th", data.xlabel);
    for (const one of columns) cell(head, "th", one.name);
    for (const n of kept) {
      const row = body.insertRow();
      if (data.points) cell(row, "td", columns[0].names[n]);
      cell(row, "td", format(first[n]));
      for (const one of columns) cell(row, "td", format(one.y[data.points ? n : nearest(one, first[n])]));
    }
    frame.className = "wide";
    frame.tabIndex = 0;
    frame.appendChild(table);
    details.appendChild(frame);
  }

  function under(event) {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT);
    const at = spans.x[0] + Math.min(1, Math.max(0, share)) * (spans.x[1] - spans.x[0]);
    return logs.x ? 10 ** at : at;
  }

  const height = event => {
    const box = svg.getBoundingClientRect();
    return (event.clientY - box.top) / box.height * H;
  };
  svg.addEventListener("pointerdown", event => { drag = under(event); show(drag, height(event)); });
  svg.addEventListener("pointermove", event => show(under(event), height(event)));
  svg.addEventListener("pointerup", event => {
    const end = under(event), width = Math.abs((scale(end, "x") ?? 0) - (scale(drag ?? end, "x") ?? 0));
    if (drag !== null && width > (spans.x[1] - spans.x[0]) / 50) zoom = [Math.min(drag, end), Math.max(drag, end)];
    drag = null;
    draw();
  });
  svg.addEventListener("pointerleave", () => { drag = null; });
  svg.addEventListener("keydown", event => {
    const move = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!move || !data.series.length) return;
    event.preventDefault();
    const x = data.series[0].x, n = cursor === null ? 0 : nearest(data.series[0], cursor) + move;
    show(x[Math.min(x.length - 1, Math.max(0, n))]);
  });
  const values = figure.querySelector(".values");
  values.addEventListener("toggle", () => { if (!values.querySelector("table")) tabulate(values); });
  values.hidden = !data.series.length;
  figure.querySelector(".tools").hidden = false;
  for (const button of figure.querySelectorAll("button")) button.addEventListener("click", () => {
    const axis = button.dataset.log;
    if (axis) { logs[axis] = !logs[axis]; button.setAttribute("aria-pressed", String(logs[axis])); } else zoom = null;
    draw();
  });
  for (const axis of ["x", "y"]) {
    figure.querySelector(`[data-log=${axis}]`).setAttribute("aria-pressed", String(logs[axis]));
  }
  draw();
}

document.querySelectorAll("figure.chart").forEach(chart);

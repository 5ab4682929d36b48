"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (id) => document.getElementById(id);
  const equations = all("#equations tbody tr");
  const lines = all("#source tr.made");
  const findings = all("#findings tbody tr");
  const byNumber = new Map([...equations].reverse().map((row) => [row.dataset.number, row]));
  const body = one("findings").querySelector("tbody");
  all(".tools, .fold").forEach((tool) => { tool.hidden = false; });

  // --- choosing: a finding, a line or an equation shows what belongs to it
  const clear = () => {
    all(".chosen, .on-way").forEach((row) => row.classList.remove("chosen", "on-way"));
    one("way").textContent = "";
  };
  const reveal = (row) => {
    if (!row) return;
    for (let r = row; r; r = r.previousElementSibling) {
      const outer = r.previousElementSibling;
      if (row.hidden && outer && Number(outer.dataset.depth) < Number(row.dataset.depth)) { unfold(outer); }
    }
    row.hidden = false;
    row.scrollIntoView({ block: "nearest" });
  };
  const choose = (rows) => rows.forEach((row) => row.classList.add("chosen"));
  const way = (row) => {
    const told = [];
    for (let at = row; at;) {
      at.classList.add("on-way");
      told.push(`${at.dataset.number} ${at.querySelector("b").textContent}`);
      const next = at.dataset.because;
      at = byNumber.get(next);
      if (!at && next) { told.push(next); }
      if (at && at.classList.contains("on-way")) break;
    }
    one("way").textContent = !row.dataset.because ? "all lanes share it" : `lanes: ${told.join(" ← ")}`;
  };
  const select = (row) => {
    clear();
    choose([row]);
    if (row.closest("#equations")) {
      way(row);
      choose(lines.filter((line) => line.dataset.line === row.dataset.line));
    } else if (row.closest("#source")) {
      const made = equations.filter((e) => e.dataset.line === row.dataset.line);
      choose(made);
      reveal(made[0]);
    } else {
      const made = row.dataset.equations.split(" ").map((n) => byNumber.get(n)).filter(Boolean);
      choose(made);
      choose(lines.filter((line) => made.some((e) => e.dataset.line === line.dataset.line)));
      reveal(made[0]);
    }
  };
  const go = (row) => { history.replaceState(null, "", `#${row.id}`); select(row); };
  document.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && row.id && !event.target.closest("a, button")) { go(row); }
  });
  const follow = () => {
    const row = one(decodeURIComponent(location.hash.slice(1)));
    if (row && row.matches("tr")) { reveal(row); select(row); row.scrollIntoView({ block: "center" }); }
  };
  addEventListener("hashchange", follow);

  // --- folding what is inside equations
  const inside = (row) => {
    const rows = [];
    for (let r = row.nextElementSibling; r && Number(r.dataset.depth) > Number(row.dataset.depth); r = r.nextElementSibling) rows.push(r);
    return rows;
  };
  const fold = (row, folded) => {
    inside(row).forEach((r) => { r.hidden = folded; });
    [row, ...inside(row)].forEach((r) => {
      const button = r.querySelector(".fold");
      if (button) { button.textContent = folded ? "▸" : "▾"; button.setAttribute("aria-expanded", String(!folded)); }
    });
  };
  const unfold = (row) => fold(row, false);
  const folders = equations.filter((row) => row.querySelector(".fold"));
  folders.forEach((row) => row.querySelector(".fold").addEventListener("click", (event) => {
    fold(row, event.target.textContent === "▾");
  }));
  let folded = false;
  const foldAll = () => {
    folded = !folded;
    folders.filter((row) => row.dataset.depth === "0").forEach((row) => fold(row, folded));
    one("fold").textContent = folded ? "Unfold all" : "Fold all";
  };
  one("fold").addEventListener("click", foldAll);

  // --- search
  const search = one("search");
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    let found = 0;
    all("#source .code tr, #equations tbody tr").forEach((row) => {
      const hit = !wanted || row.textContent.toLowerCase().includes(wanted);
      row.hidden = !hit;
      found += Number(hit && Boolean(wanted));
    });
    one("matches").textContent = wanted ? `${found} found` : "";
  });

  // --- findings: sorted and filtered
  const rank = { number: (r) => Number(r.dataset.number), severity: (r) => -Number(r.dataset.rank), share: (r) => -Number(r.dataset.share),
    line: (r) => Number(r.dataset.line), text: (r) => r.dataset.text };
  all("#findings th[data-sort]").forEach((head) => {
    head.tabIndex = 0;
    head.setAttribute("role", "button");
    const sort = () => {
      const value = rank[head.dataset.sort];
      const down = head.getAttribute("aria-sort") === "ascending";
      all("#findings th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = [...findings].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
      if (down) sorted.reverse();
      body.append(...sorted);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
  const severity = one("severity");
  if (severity) {
    severity.addEventListener("change", () => {
      findings.forEach((row) => { row.hidden = Boolean(severity.value) && row.dataset.severity !== severity.value; });
    });
  }

  // --- keys, theme
  const theme = () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  };
  one("theme").addEventListener("click", theme);
  one("help-button").addEventListener("click", () => one("help").showModal());
  const step = (by) => {
    const shown = all("#findings tbody tr").filter((row) => !row.hidden);
    if (!shown.length) return;
    const at = shown.findIndex((row) => row.classList.contains("chosen"));
    const next = shown[at < 0 ? (by > 0 ? 0 : shown.length - 1) : (at + by + shown.length) % shown.length];
    next.focus();
    go(next);
  };
  const keys = { j: () => step(1), k: () => step(-1), f: foldAll, t: theme, "?": () => one("help").showModal(), Escape: clear,
    "/": () => search.focus() };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.key === "Enter" && event.target.matches("tr[id]")) { go(event.target); return; }
    if (keys[event.key] && !one("help").open) { event.preventDefault(); keys[event.key](); }
  });
  follow();
})();

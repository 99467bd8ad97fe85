"use strict";
(() => {
  const all = (selector, at = document) => [...at.querySelectorAll(selector)];
  const one = (selector, at = document) => at.querySelector(selector);
  const form = one("#filters"), peek = one("#peek");
  const target = (link) => document.getElementById(link.hash.slice(1));
  const squeezed = (text) => text.replace(/\s+/g, " ").trim();

  // --- filters: rows of the map of families, then rows of the maps by depth -------------------
  // 12 and {0..93} stand for any number, so that the name of one layer finds its family.
  const loose = (text) => text.toLowerCase().replace(/(^|\.)(\d+|\{[\d.,]+\})(?=\.|$)/g, "$1#");
  const rows = all("#layers tbody[data-paths]").map((body) => ({
    body,
    text: squeezed(body.textContent).toLowerCase(),
    name: loose(one("th code", body).textContent),
    layers: Number(one("th small", body).textContent.split(" ")[0].replace(/,/g, "")),
  }));
  const siblings = (name) => {
    const found = name.match(/^(.*)\{([^{}]*)\}$/);
    return found ? found[2].split(",").map((leaf) => found[1] + leaf) : [name];
  };
  const filter = () => {
    const words = form.elements.text.value.trim();
    const kind = form.elements.kind.value, degree = form.elements.degree.value;
    const paths = new Set(all("[name=path]:checked", form).map((box) => box.value));
    const like = loose(words);
    let shown = 0, layers = 0;
    for (const { body, text, name, layers: count } of rows) {
      const there = degree === "" ? [...body.dataset.paths] : [body.dataset.paths[degree]];
      const fits = (!kind || body.dataset.kind === kind) && there.some((path) => paths.has(path)) &&
        (text.includes(words.toLowerCase()) || siblings(name).some((leaf) => leaf.includes(like)));
      body.hidden = !fits;
      shown += fits;
      layers += fits ? count : 0;
    }
    form.elements.count.value =
      `${shown} of ${rows.length} rows, ${layers.toLocaleString("en")} layers`;
    one("#none").hidden = shown > 0;
    for (const table of all(".panel table")) {
      const stack = table.caption.textContent.replace(/ at tp \d+$/, "");
      const columns = all("th[data-kind]", table);
      const parents = all("th[scope=colgroup]", table).flatMap((head) =>
        Array(head.colSpan).fill(head.textContent));
      for (const row of all("tbody tr", table)) {
        const number = row.cells[0].firstChild.data;
        let some = false;
        columns.forEach((column, place) => {
          const cell = row.cells[place + 1];
          const name = `${stack}.${number}.${parents[place]}.${column.textContent}`.toLowerCase();
          const fits = cell.className && paths.has(cell.className[0]) &&
            (!kind || column.dataset.kind === kind) &&
            (!words || name.includes(words.toLowerCase()) || matchesRow(cell, words));
          cell.classList.toggle("off", !fits);
          some ||= fits;
        });
        row.classList.toggle("out", !some);
      }
    }
    all(".map").forEach(rove);
  };
  // A word that is in the reasons of a family finds its cells too.
  const matchesRow = (cell, words) => {
    const link = one("a", cell), row = link && target(link);
    return Boolean(row) && squeezed(row.textContent).toLowerCase().includes(words.toLowerCase());
  };

  // --- one stop for Tab in each map, arrow keys inside it -------------------------------------
  const links = (table) => all("td a", table).filter((link) =>
    link.closest("details") === null && link.offsetParent !== null);
  const rove = (table) => {
    const every = all("td a", table).filter((link) => link.closest("details") === null);
    const seen = links(table);
    const current = seen.find((link) => link.tabIndex === 0 && link.dataset.here) || seen[0];
    for (const link of every) link.tabIndex = link === current ? 0 : -1;
  };
  const settle = (link) => {
    for (const other of all("a[data-here]", link.closest("table"))) {
      delete other.dataset.here;
      other.tabIndex = -1;
    }
    link.dataset.here = "1";
    link.tabIndex = 0;
  };
  const step = (link, key) => {
    const cell = link.closest("td"), row = cell.parentElement;
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const inRow = links(row);
    if (sideways) return inRow[inRow.indexOf(link) + sideways];
    if (key === "Home") return inRow[0];
    if (key === "End") return inRow.at(-1);
    const rowsOf = all("tr", link.closest("table")).filter((other) => links(other).length);
    const other = rowsOf[rowsOf.indexOf(row) + (key === "ArrowUp" ? -1 : 1)];
    return other && (links(other).find((next) => next.closest("td").cellIndex === cell.cellIndex) ||
      links(other)[0]);
  };

  // --- the reasons of a cell: seen beside it, opened by it ------------------------------------
  const describe = (link) => {
    const cell = link.closest("td"), table = link.closest("table"), found = target(link);
    const row = squeezed(cell.parentElement.cells[0].firstChild.textContent);
    const heads = all("thead tr:last-child th", table);
    const fine = table.classList.contains("fine");
    const head = squeezed(heads[cell.cellIndex - (fine ? 1 : 0)].textContent);
    const place = fine ? `${table.caption.textContent}, layer ${row}, ${head}` : `${row}, ${head}`;
    const sums = found && found.matches(".sums tr") && [...found.cells].slice(1);
    const why = sums ? sums.map((part) => squeezed(part.innerText || part.textContent))
      : [squeezed(link.textContent), found ? squeezed((one("summary", found) || found).textContent) : ""];
    return [place, ...why.filter(Boolean)];
  };
  const show = (link) => {
    const [place, ...why] = describe(link);
    const strong = document.createElement("b");
    strong.textContent = place;
    peek.replaceChildren(strong, ...why.map((text) => {
      const part = document.createElement("span");
      part.textContent = text;
      return part;
    }));
    peek.className = link.closest("td").className;
    peek.hidden = false;
  };
  const hide = () => { peek.hidden = true; };
  let origin = null;
  const open = (link) => {
    const found = target(link);
    if (!found) return;
    origin = link;
    const body = found.closest("tbody[data-paths]");
    if (body) body.hidden = false;
    const details = found.closest("details") || one("details", found);
    if (details) details.open = true;
    for (const lit of all(".lit")) lit.classList.remove("lit");
    found.classList.add("lit");
    const stop = (details && one("summary", details)) || found;
    stop.focus({ preventScroll: true });
    found.scrollIntoView({ block: "nearest" });
    hide();
  };
  const cellLink = (event) => {
    const link = event.target.closest && event.target.closest(".map td a, .apart li a");
    return link && link.closest(".why") === null ? link : null;
  };

  document.addEventListener("click", (event) => {
    const link = cellLink(event);
    if (!link) return;
    event.preventDefault();
    open(link);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (!peek.hidden) hide();
      else if (origin && document.activeElement.closest("details")) origin.focus();
      return;
    }
    const link = cellLink(event);
    if (!link || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === " ") {
      event.preventDefault();
      open(link);
    } else if (/^(Arrow|Home|End)/.test(event.key) && link.closest(".map")) {
      event.preventDefault();
      const next = step(link, event.key);
      if (next) next.focus();
    }
  });
  document.addEventListener("focusin", (event) => {
    const link = cellLink(event);
    if (!link || !link.closest(".map")) return hide();
    settle(link);
    show(link);
  });
  document.addEventListener("mouseover", (event) => {
    const cell = event.target.closest && event.target.closest(".map td");
    const link = cell && cell.closest(".why") === null && one("a", cell);
    if (link) show(link);
    else if (!cellLink({ target: document.activeElement })) hide();
  });

  // --- start ----------------------------------------------------------------------------------
  form.hidden = false;
  for (const part of all(".script")) part.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  one("[type=reset]", form).addEventListener("click", (event) => {
    event.preventDefault();
    form.reset();
    filter();
  });
  form.elements.degree.addEventListener("change", () => {
    const panel = one(`#d${form.elements.degree.value || "none"}`);
    if (panel) panel.checked = true;
    filter();
  });
  for (const radio of all(".chooser input")) radio.addEventListener("change", () =>
    all(".map").forEach(rove));
  const closed = [];
  window.addEventListener("beforeprint", () => {
    for (const details of all("details:not([open])")) {
      closed.push(details);
      details.open = true;
    }
  });
  window.addEventListener("afterprint", () => {
    for (const details of closed.splice(0)) details.open = false;
  });
  filter();
})();

"use strict";
/* Keeps a page up to date with what the server that it came from has read since, without moving what is being read. */
(() => {
  const EVERY = 2000, SLOWEST = 10000;  // milliseconds between questions
  const { data, drawAnew, grow, listen, sort, showMatrices } = globalThis.report;
  const status = document.getElementById("live");
  let version = data.version, wait = EVERY;

  const slot = (name) => document.querySelector(`[data-part="${name}"]`);
  const regions = (place) => [...place.querySelectorAll(".scrolls, nav")];
  const label = (region) => region.getAttribute("aria-label");

  /* What a reader did to a part: how tables are sorted and scrolled, what is unfolded, and where the focus is. */
  const remember = (place) => ({
    scrolled: new Map(regions(place).map((each) => [label(each), [each.scrollLeft, each.scrollTop]])),
    sorted: new Map([...place.querySelectorAll("table.sorts")].map((table) => {
      const heads = [...table.tHead.rows[0].cells];
      const column = heads.findIndex((head) => !["none", null].includes(head.getAttribute("aria-sort")));
      return [table.caption.textContent, column < 0 ? null : [heads[column].textContent, heads[column].getAttribute("aria-sort") === "ascending"]];
    })),
    open: new Set([...place.querySelectorAll("details[open] > summary")].map((each) => each.textContent)),
    focus: [...place.querySelectorAll("a, button, summary, [tabindex]")].indexOf(document.activeElement),
  });

  const restore = (place, kept) => {
    for (const each of place.querySelectorAll("details > summary")) {
      if (kept.open.has(each.textContent)) each.parentElement.open = true;
    }
    for (const table of place.querySelectorAll("table.sorts")) {
      const [head, ascending] = kept.sorted.get(table.caption.textContent) || [];
      const column = [...table.tHead.rows[0].cells].findIndex((each) => each.textContent === head);
      if (column >= 0) sort(table, column, ascending);
    }
    for (const each of regions(place)) [each.scrollLeft, each.scrollTop] = kept.scrolled.get(label(each)) || [0, 0];
    if (kept.focus >= 0) place.querySelectorAll("a, button, summary, [tabindex]")[kept.focus]?.focus({ preventScroll: true });
  };

  /* The first part that is seen stays where it is, whatever grows above it. */
  const still = (change) => {
    const seen = [...document.querySelectorAll("[data-part]")].find((each) => each.getBoundingClientRect().bottom > 0 && each.offsetHeight);
    const before = seen?.getBoundingClientRect().top ?? 0, isScrolled = scrollY > 0;
    change();
    const moved = seen ? seen.getBoundingClientRect().top - before : 0;
    if (isScrolled && moved) scrollBy({ top: moved, behavior: "instant" });
  };

  const replace = (name, html) => {
    const place = slot(name);
    if (!place) return;
    const kept = remember(place);
    place.innerHTML = html;
    listen(place);
    restore(place, kept);
  };

  const show = (news) => still(() => {
    const charts = news["data/charts"], isGrown = !charts || grow(charts);
    for (const [name, html] of Object.entries(news)) {
      if (name.startsWith("html/") && !(name === "html/charts" && isGrown)) replace(name, html);
    }
    if (!isGrown) drawAnew(charts);
    for (const [key, words] of Object.entries(news["data/summaries"] || {})) {
      const plot = document.getElementById(`chart-${key}`), caption = plot?.parentElement.querySelector("figcaption");
      if (!caption) continue;
      caption.textContent = words;
      plot.setAttribute("aria-label", `${plot.parentElement.querySelector("h3").textContent}. ${words}`);
    }
    if (news["data/matrices"] || news["html/wrong"] !== undefined) {
      data.matrices = news["data/matrices"] || data.matrices;
      showMatrices(data.matrices);
    }
  });

  const say = (words, isLost) => {
    if (status.textContent !== words) status.textContent = words;
    status.classList.toggle("lost", isLost);
  };

  const ask = async () => {
    try {
      const answer = await fetch(`live.json?since=${version}`, { cache: "no-store" });
      if (answer.status === 200) {
        const news = await answer.json();
        if (news.reload) return location.reload();
        version = news.version;
        show(news);
        document.documentElement.dataset.version = version;
        wait = EVERY;
      } else if (answer.status === 404) say("This run is no longer there: this is what was last read", true);
      else wait = Math.min(SLOWEST, 1.1 * wait);
      if (answer.ok) say("Following", false);
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;  // fetch's, when there is no server
      say("The connection to falconet watch is lost: this is what was last read", true);
      wait = Math.min(SLOWEST, 1.5 * wait);
    }
    next();
  };

  let timer = 0;
  const next = () => { clearTimeout(timer); if (!document.hidden) timer = setTimeout(ask, wait); };
  document.addEventListener("visibilitychange", () => { wait = 0; next(); wait = EVERY; });  // a hidden page asks nothing
  next();
})();

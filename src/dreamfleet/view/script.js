// Small functions that charts and tables name. What they show comes from runs, and is text.
window.dreamfleet = {
  shade() {
    const dark = !Quasar.Dark.isActive;
    Quasar.Dark.set(dark);
    localStorage.setItem("dreamfleet-dark", dark ? "1" : "0");
  },
  // 12,345,678 as 12.3M; the same digits as dreamfleet.formatting.readable. An axis needs more of
  // them where its numbers hardly differ.
  short(value, more = 0) {
    if (value === null || value === undefined || value === "") return "";
    const size = Math.abs(value);
    if (!Number.isFinite(value)) return String(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]])
      if (size >= limit) return Number((value / limit).toPrecision(3 + more)) + unit;
    if (size >= 1e4) return Number((value / 1e3).toPrecision(3 + more)) + "k";
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    if (size >= 1000 && !more) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4 + more)));
  },
  hours(value) {
    if (value === null || value === undefined) return "";
    if (value < 1) return Math.round(value * 60) + " min";
    return value.toFixed(value < 10 ? 1 : 0) + " h";
  },
  text(value) {
    const span = document.createElement("span");
    span.textContent = value;
    return span.innerHTML;
  },
  // Of a chart: the values at one place. Bands, which have no name, are drawn only; a
  // curve that is drawn in two parts is shown once, with what is told of its point.
  tip(items) {
    const names = new Set();
    const shown = [].concat(items).filter(({ seriesName: name, value }) => {
      const there = !name.startsWith("series\0") && Number.isFinite(value[1]) && !names.has(name);
      return there && names.add(name);
    });
    if (!shown.length) return "";
    const at = dreamfleet.short(shown[0].value[0]);
    const rows = shown.map(
      (item) =>
        `<tr><td><i style="background:${dreamfleet.text(item.color)}"></i>` +
        `${dreamfleet.text(item.seriesName)}</td><td>${dreamfleet.short(item.value[1])}` +
        `${item.value[2] ? ` (${dreamfleet.text(item.value[2])})` : ""}</td></tr>`
    );
    return `<div class="tip"><b>${at}</b><table>${rows.join("")}</table></div>`;
  },
};
document.addEventListener("DOMContentLoaded", () => {
  const chosen = localStorage.getItem("dreamfleet-dark");
  if (chosen !== null) Quasar.Dark.set(chosen === "1");
});
// A server that was started again has another token: its answer says what to do.
setInterval(async () => {
  if (!window.did_handshake || window.socket.connected) return;
  const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
  if (answer?.status === 403) location.reload();
}, 2000);

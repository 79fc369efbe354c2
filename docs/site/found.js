// A search leads to the first place that it found, not only to the page.
addEventListener("load", () =>
  setTimeout(() => {
    const found = location.hash ? null : document.querySelector("article .highlighted");
    found?.scrollIntoView({ block: "center", behavior: "instant" });
  }, 50) // Sphinx marks what was found 10 ms after the page is there.
);

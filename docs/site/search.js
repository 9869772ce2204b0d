// Let the search find a pasted message. Sphinx lists the pages that have every word of the query, and a message has words
// that no page has: a path, a host, a step. Two things are added to what it finds:
//
// - the entries of docs/troubleshooting.md whose heading is in the query, first: "A … B" is in it if A is, and later B;
// - if nothing is found at all, the pages that share the most words with it, a word of few pages counting more.

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // another page
  const search = Search._performSearch;
  Search._performSearch = (query, terms, ...rest) => {
    const found = [...search(query, terms, ...rest), ...entriesIn(query)]; // the last one is shown first
    return found.length ? found : pagesSharing(terms);
  };
});

/** Find the entries whose heading is in the query, the longest last. */
function entriesIn(query) {
  const { alltitles, docnames } = Search._index;
  const page = docnames.indexOf("docs/troubleshooting");
  const pasted = plain(query);
  const found = [];
  for (const [title, places] of Object.entries(alltitles))
    for (const [file, id] of places)
      if (file === page && id && contains(pasted, plain(title).split("…")))
        found.push(result(file, title, `#${id}`, 1000 + title.length));
  return found.sort((a, b) => a[4] - b[4]);
}

/** Find the ten pages that share the most words with the query, the best last. */
function pagesSharing(terms) {
  const scores = new Map();
  for (const term of terms) {
    const files = [Search._index.terms[term] ?? []].flat();
    for (const file of files) scores.set(file, (scores.get(file) ?? 0) + 1 / files.length);
  }
  const best = [...scores].sort((a, b) => a[1] - b[1]).slice(-10);
  return best.map(([file, score]) => result(file, Search._index.titles[file], "", score));
}

const plain = (text) => text.toLowerCase().replace(/\s+/g, " ").trim();

function contains(text, parts) {
  let from = 0;
  return parts.every((part) => {
    const at = text.indexOf(part.trim(), from);
    from = at + part.trim().length;
    return at >= 0;
  });
}

/** A result as Sphinx's own: page, title, anchor, description, score, file, kind. */
function result(file, title, anchor, score) {
  const { docnames, filenames } = Search._index;
  return [docnames[file], title, anchor, null, score, filenames[file], anchor ? "title" : "text"];
}

// Which layers a regular expression matches, found in a worker that is stopped when the expression takes too long.

const PATIENCE = 2000; // milliseconds, once the worker runs: on a machine that trains it may take seconds to start

// lists: names of layers, one list per run. Resolves to the positions of the matching ones in each, or throws what is wrong.
export function matching(pattern, lists) {
  if (pattern === "") return Promise.resolve(lists.map((names) => names.map((_, index) => index)));
  return new Promise((resolve, reject) => {
    const worker = new Worker("/static/filter-worker.js");
    let stop;
    worker.onmessage = ({ data: { started, found, error } }) => {
      if (started) {
        stop = setTimeout(() => {
          worker.terminate();
          reject(new Error("this expression takes too long: make it simpler"));
        }, PATIENCE);
        worker.postMessage({ pattern, lists });
        return;
      }
      clearTimeout(stop);
      worker.terminate();
      if (error) reject(new Error(error));
      else resolve(found);
    };
  });
}

// 0,1,2,7 → "0-2,7"
export function ranges(positions) {
  const parts = [];
  for (const position of positions) {
    const last = parts.at(-1);
    if (last && last[1] === position - 1) last[1] = position;
    else parts.push([position, position]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

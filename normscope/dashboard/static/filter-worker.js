// Runs a regular expression where it can be stopped.

onmessage = ({ data: { pattern, lists } }) => {
  try {
    const expression = new RegExp(pattern);
    postMessage({ found: lists.map((names) => names.flatMap((name, index) => (expression.test(name) ? [index] : []))) });
  } catch (error) {
    postMessage({ error: error.message.replace(/^Invalid regular expression: /, "") });
  }
};

postMessage({ started: true });

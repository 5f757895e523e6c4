// Talks to the server: relative addresses only, so that the token stays in the path.

export async function get(path) {
  return (await answer(await fetch(path))).json();
}

export async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return (await answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }))).json();
}

export async function getTimes(path) {
  return new Float64Array(await (await answer(await fetch(path))).arrayBuffer());
}

// A curve: a JSON head behind its length, then times, least and greatest values as float32.
export async function getCurve(path) {
  const data = await (await answer(await fetch(path))).arrayBuffer();
  const length = new DataView(data).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  const numbers = new Float32Array(data, 4 + length);
  const [points, elements] = [head.points, head.labels.length];
  const low = numbers.subarray(points, points * (1 + elements));
  const high = head.band ? numbers.subarray(points * (1 + elements)) : low;
  return { labels: head.labels, points, elements, t: numbers.subarray(0, points), low, high };
}

async function answer(response) {
  if (response.ok) return response;
  let reason = `${response.status}`;
  try { reason = (await response.json()).error || reason; } catch { /* no JSON: the number says it */ }
  throw new Error(reason);
}

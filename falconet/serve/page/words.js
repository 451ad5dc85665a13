/* Numbers in words, and results as JSON and CSV. */

const THIN = "\u202f"; // a narrow space that does not break

export function percent(probability) {
  if (typeof probability !== "number") return "unknown"; // null stands for what is not a number
  const value = 100 * probability;
  if (value > 0 && value < 0.05) return `< 0.1${THIN}%`;
  if (value < 100 && value >= 99.95) return `> 99.9${THIN}%`;
  return `${value.toFixed(1)}${THIN}%`;
}

export const rounded = (value) => (value < 100 ? value.toFixed(1) : value.toFixed(0));

export const milliseconds = (value) => `${rounded(value)}${THIN}ms`;

export const counted = (count, noun, nouns = `${noun}s`) => `${count.toLocaleString("en")} ${count === 1 ? noun : nouns}`;

export const sentence = (text) => {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
};

/** Results as the server gave them, with the file's own name and the time of the round trip. */
export const record = ({ file, answer, error }) =>
  answer
    ? {
        ...answer.prediction,
        name: file.name,
        model: answer.model,
        version: answer.version,
        milliseconds: { ...answer.milliseconds, round_trip: answer.roundTrip },
      }
    : { name: file.name, error: error?.message ?? "not classified" };

/** The columns of `falconet predict --csv --top 5`, and what else is known. */
export function csv(photos, top) {
  const records = photos.map(record);
  const several = records.some(({ labels }) => labels);
  const most = Math.min(top, Math.max(1, ...records.map((one) => one.top?.length ?? 0)));
  const ranks = Array.from({ length: most }, (_, at) => at);
  const named = ranks.map((at) => (at ? `_${at + 1}` : "")).flatMap((end) => [`label${end}`, `probability${end}`]);
  const rows = records.map((one) => [
    one.name,
    ...ranks.flatMap((at) => [one.top?.[at]?.label, one.top?.[at]?.probability]),
    ...(several ? [one.labels?.join("; ")] : []),
    one.model,
    one.version,
    one.milliseconds?.total,
    one.milliseconds?.round_trip,
    one.error,
  ]);
  const rest = ["model", "version", "server_ms", "round_trip_ms", "error"];
  const titles = ["path", ...named, ...(several ? ["labels"] : []), ...rest];
  return [titles, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value) {
  if (value === undefined || value === null) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value; // a spreadsheet would run a formula
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The Training tab: reads Airflow's REST API with the user's own cookie and draws what the trigger wrote to the
// XCom `progress`. Everything shown is set as text, never as markup: run ids and XComs are user input.

const POLL_MS = 3000;
const query = new URLSearchParams(location.search);
const base = location.pathname.replace(/\/tfps\/[^/]*$/, "");
const run = `${base}/api/v2/dags/${encodeURIComponent(query.get("dag_id"))}/dagRuns/${encodeURIComponent(query.get("run_id"))}`;
const RUNNING = new Set(["deferred", "running", "queued", "scheduled", "up_for_retry", null]);

async function get(url) {
  const response = await fetch(url, { credentials: "same-origin" });
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`Airflow answered ${response.status} ${response.statusText}`);
  return response.json();
}

async function trainTasks() {
  const found = [];
  for (let offset = 0; ; offset += 100) {
    const page = await get(`${run}/taskInstances?limit=100&offset=${offset}`);
    if (page === null) throw new Error("there is no such DAG run");
    found.push(...page.task_instances);
    if (found.length >= page.total_entries || page.task_instances.length === 0) break;
  }
  const asked = query.get("task_id");
  const group = asked && asked.includes(".") ? asked.slice(0, asked.lastIndexOf(".")) : null;
  const index = query.get("map_index");
  return found
    .filter((task) => task.operator_name === "TrainOperator" || task.operator === "TrainOperator")
    .filter((task) => !asked || task.task_id === asked || (group && task.task_id.startsWith(`${group}.`)))
    .filter((task) => !asked || index === null || index === "" || index.startsWith("{") || Number(index) < 0 || task.map_index === Number(index));
}

function progressOf(task) {
  const url = `${run}/taskInstances/${encodeURIComponent(task.task_id)}/xcomEntries/progress?deserialize=true&map_index=${task.map_index}`;
  return get(url).then((entry) => (entry ? entry.value : null));
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });

function chart(title, points) {
  const figure = element("figure");
  figure.append(element("figcaption", title));
  const shown = points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  if (shown.length < 2) {
    figure.append(element("p", "not enough points yet"));
    return figure;
  }
  const xs = shown.map(([x]) => x), ys = shown.map(([, y]) => y);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const width = right - left || 1, height = high - low || 1;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: ${number(ys[0])} at first, ${number(ys[ys.length - 1])} now`);
  for (const y of [0, 50, 100]) {
    const grid = document.createElementNS(svg.namespaceURI, "line");
    for (const [key, value] of Object.entries({ x1: 0, x2: 100, y1: y, y2: y })) grid.setAttribute(key, value);
    svg.append(grid);
  }
  const line = document.createElementNS(svg.namespaceURI, "polyline");
  line.setAttribute("points", shown.map(([x, y]) => `${((x - left) / width) * 100},${100 - ((y - low) / height) * 100}`).join(" "));
  svg.append(line);
  const scale = element("div", undefined, "scale");
  scale.append(element("span", `step ${number(left, 8)}`), element("span", `${number(low)} … ${number(high)}`), element("span", `step ${number(right, 8)}`));
  figure.append(svg, scale);
  return figure;
}

const FINAL = new Set(["SUCCEEDED", "FAILED", "STOPPED", "LOST"]);
const KIND = { SUCCEEDED: "good", RUNNING: "good", FAILED: "bad", LOST: "bad", BACKOFF: "busy", STARTING: "busy", STOPPING: "busy" };

function draw(section, task, progress) {
  const group = task.task_id.replace(/\.?train$/, "") || task.task_id;
  section.querySelector("h2").textContent = task.map_index >= 0 ? `${group} [${task.map_index}]` : group;
  const state = section.querySelector(".state");
  state.textContent = progress && progress.outcome ? progress.outcome : task.state || "not started";
  state.className = `state ${{ success: "good", failed: "bad", succeeded: "good" }[state.textContent] || "busy"}`;
  const note = section.querySelector(".note");
  if (!progress) {
    note.textContent = RUNNING.has(task.state) ? "Nothing to show until the chief has made its first steps." : "This training left no progress.";
    return;
  }
  const bar = section.querySelector(".bar");
  const steps = Number(progress.steps), step = progress.global_step;
  bar.hidden = !steps;
  bar.setAttribute("aria-valuemax", steps || 1);
  bar.setAttribute("aria-valuenow", step || 0);
  bar.firstElementChild.style.width = `${Math.min(100, (100 * (step || 0)) / (steps || 1))}%`;
  const left = steps && progress.steps_per_sec ? Math.max(0, steps - step) / progress.steps_per_sec : null;
  const numbers = { "global step": steps ? `${number(step, 9)} of ${number(steps, 9)}` : number(step, 9), loss: number(progress.loss), "steps/s": number(progress.steps_per_sec) };
  if (left !== null && !progress.outcome) numbers["time left"] = left < 90 ? `${Math.round(left)} s` : `${Math.round(left / 60)} min`;
  section.querySelector(".numbers").replaceChildren(
    ...Object.entries(numbers).map(([name, value]) => {
      const row = element("div");
      row.append(element("dt", name), element("dd", value));
      return row;
    }),
  );
  section.querySelector(".charts").replaceChildren(
    chart("loss of the chief", progress.curve.map(([, x, loss]) => [x, loss])),
    chart("global steps per second", progress.curve.map(([, x, , rate]) => [x, rate])),
  );
  section.querySelector("tbody").replaceChildren(
    ...progress.tasks.map((row) => {
      const tr = element("tr");
      tr.append(element("td", row.task), element("td", row.host), element("td", row.gpus.length ? row.gpus.join(", ") : "–"));
      // The last word comes with the verdict; what still ran then has been stopped since.
      const state = progress.outcome && !FINAL.has(row.state) ? "STOPPED" : row.state;
      tr.append(element("td", state, KIND[state]), element("td", number(row.global_step, 9)), element("td", String(row.restarts)));
      return tr;
    }),
  );
  note.textContent = progress.tasks_left_out ? `${progress.tasks_left_out} more TF tasks are not shown.` : `Training ${progress.training}`;
}

const sections = new Map();

async function look() {
  const message = document.getElementById("message");
  let goesOn = true;
  try {
    const tasks = await trainTasks();
    message.hidden = tasks.length > 0;
    message.textContent = "This run has no training.";
    goesOn = tasks.some((task) => RUNNING.has(task.state));
    for (const task of tasks) {
      const key = `${task.task_id}/${task.map_index}`;
      if (!sections.has(key)) {
        const made = document.getElementById("training").content.firstElementChild.cloneNode(true);
        document.getElementById("trainings").append(made);
        sections.set(key, made);
      }
      draw(sections.get(key), task, await progressOf(task));
    }
  } catch (error) {
    message.hidden = false;
    message.textContent = `${error.message}; trying again.`;
  }
  if (goesOn) setTimeout(look, POLL_MS);
}

look();

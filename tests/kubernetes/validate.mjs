// Holds resources of KEDA, the Gateway API and the Prometheus operator to the schemas of their makers: a JSON array of them on stdin, and on
// stdout one of what is wrong with each, null where that is nothing. What a schema does not look at, it does not know:
// a cluster would drop that without a word, here it is wrong.
import { readFileSync } from "node:fs";

const PACKAGES = {
  "gateway.networking.k8s.io": "@kubernetes-models/gateway-api",
  "keda.sh": "@kubernetes-models/keda",
  "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
};

// A copy that takes each of its paths out of a set when somebody reads it.
function watched(value, path, unread) {
  if (value === null || typeof value !== "object") return value;
  const copy = Array.isArray(value) ? [] : {};
  for (const [key, each] of Object.entries(value)) {
    const place = `${path}/${key}`;
    const inner = watched(each, place, unread);
    unread.add(place);
    const get = () => {
      unread.delete(place);
      return inner;
    };
    Object.defineProperty(copy, key, { enumerable: true, get });
  }
  return copy;
}

async function complaint(resource) {
  const [group] = resource.apiVersion.split("/");
  const { [resource.kind]: Model } = await import(`${PACKAGES[group]}/${resource.apiVersion}`);
  const unread = new Set();
  try {
    // Not of a Model, which would be a copy, and all of it read.
    Model.prototype.validate.call(watched(resource, "", unread));
  } catch (error) {
    return error.message;
  }
  return unread.size ? `unknown: ${[...unread].join(", ")}` : null;
}

const resources = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(resources.map(complaint))));

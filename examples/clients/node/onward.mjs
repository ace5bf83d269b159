// A client of onward.v1 for Node, without generated code: the contract itself is read when the program starts.
//
// Two calls, `generate` and `stream`, with a deadline, cancellation, and the same rule for retries as the Python client:
// what the server refuses with a time to come again, and what finds nobody, is tried again; never once something of the
// answer was heard, and never past the deadline.

import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import protobuf from 'protobufjs';

const CONTRACT = fileURLToPath(new URL('../../../proto/onward/v1/generation.proto', import.meta.url));
const MAX_ATTEMPTS = 5;
const INITIAL_BACKOFF_MS = 100;
const MAX_BACKOFF_MS = 5000;

// What is read here of google.rpc.Status; its numbers are the standard's.
const { Status, RetryInfo } = protobuf.parse(`
  syntax = "proto3";
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
  message RetryInfo { Duration retry_delay = 1; }
`).root.nested;

/**
 * Opens a connection to "host:port". Fields are spelled as in JSON, as in `stopping: { maxTokens: 8 }`.
 *
 * @param {string} target
 * @param {{ca?: Buffer, key?: Buffer, certificate?: Buffer, apiKey?: string}} [options] PEM files' contents; a `ca` turns
 *   TLS on. The API key is shown with every call.
 */
export function connect(target, { ca, key, certificate, apiKey } = {}) {
  const definition = protoLoader.loadSync(CONTRACT, { enums: String, longs: String, oneofs: true });
  const { GenerationService } = grpc.loadPackageDefinition(definition).onward.v1;
  const credentials = ca ? grpc.credentials.createSsl(ca, key, certificate) : grpc.credentials.createInsecure();
  const service = new GenerationService(target, credentials, {
    // Between two tries to connect every call fails at once: our next try must not fall into that.
    'grpc.initial_reconnect_backoff_ms': INITIAL_BACKOFF_MS,
    'grpc.max_reconnect_backoff_ms': MAX_BACKOFF_MS,
  });
  const metadata = new grpc.Metadata();
  if (apiKey) metadata.set('authorization', `Bearer ${apiKey}`);
  return { service, metadata, close: () => service.close() };
}

/** Answers with a GenerateResponse, when every output has ended. */
export function generate({ service, metadata }, request, { timeoutSeconds = 60 } = {}) {
  const deadline = Date.now() + timeoutSeconds * 1000;
  return retrying(deadline, () => new Promise((resolve, reject) => {
    service.generate(request, metadata, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  }));
}

/** The events of a stream as they come. Leaving the loop gives the request up, and the server frees what it held. */
export async function* stream({ service, metadata }, request, { timeoutSeconds = 60 } = {}) {
  const deadline = Date.now() + timeoutSeconds * 1000;
  let call;
  let events;
  try {
    let next = await retrying(deadline, () => {
      call = service.generateStream(request, metadata, { deadline });
      // Once nobody reads it any more, its end must not end the program.
      call.on('error', () => {});
      events = call[Symbol.asyncIterator]();
      return events.next();
    });
    let last;
    for (; !next.done; next = await events.next()) {
      last = next.value;
      yield last;
    }
    if (last?.event !== 'summary') throw new Error('the stream ended before the answer did');
  } finally {
    call?.cancel();
  }
}

async function retrying(deadline, attempt) {
  for (let number = 1; ; number += 1) {
    try {
      return await attempt();
    } catch (error) {
      const told = retryDelayMs(error);
      const helps = told !== null || error.code === grpc.status.UNAVAILABLE;
      const longest = Math.min(MAX_BACKOFF_MS, INITIAL_BACKOFF_MS * 2 ** (number - 1));
      // A random part of it, so that those who were refused together do not come again together.
      const pause = (told ?? 0) + Math.random() * longest;
      if (!helps || number === MAX_ATTEMPTS || Date.now() + pause >= deadline) throw error;
      // In whole milliseconds, of which its clock may already have lost a part.
      await sleep(Math.ceil(pause) + 1);
    }
  }
}

/** When to come again, of a RESOURCE_EXHAUSTED that says so; else null. */
function retryDelayMs(error) {
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (error.code !== grpc.status.RESOURCE_EXHAUSTED || !packed) return null;
  const detail = Status.decode(packed).details.find(({ typeUrl }) => typeUrl.endsWith('/google.rpc.RetryInfo'));
  if (!detail) return null;
  const { retryDelay } = RetryInfo.decode(detail.value);
  return Number(retryDelay?.seconds ?? 0) * 1000 + (retryDelay?.nanos ?? 0) / 1e6;
}

// Asks a served model from the command line:
//
//   node ask.mjs MODEL TEXT [--target HOST:PORT] [--stream] [--max-tokens N] [--timeout-seconds S]
//                [--stop-after CHUNKS] [--api-key-file FILE] [--ca-certificate FILE]
//
// Prints the text, then one line of JSON: why the answer ended, the tokens used, the request's id. A stream that is left
// after so many chunks has no such line. Exits with 1 and the status on stderr if it fails.

import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';

import grpc from '@grpc/grpc-js';

import { connect, generate, stream } from './onward.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    target: { type: 'string', default: '127.0.0.1:8001' },
    stream: { type: 'boolean', default: false },
    'max-tokens': { type: 'string', default: '256' },
    'timeout-seconds': { type: 'string', default: '60' },
    'stop-after': { type: 'string' },
    'api-key-file': { type: 'string' },
    'ca-certificate': { type: 'string' },
  },
});
const [model, text] = positionals;
const request = { model, text, sampling: { temperature: 0 }, stopping: { maxTokens: Number(values['max-tokens']) } };
const timing = { timeoutSeconds: Number(values['timeout-seconds']) };

async function askOnce(server) {
  const { outputs: [output], usage, requestId } = await generate(server, request, timing);
  process.stdout.write(`${output.text}\n`);
  return { finishReason: output.finishReason, usage, requestId };
}

async function askStream(server) {
  const told = {};
  let chunksLeft = Number(values['stop-after'] ?? Infinity);
  for await (const event of stream(server, request, timing)) {
    switch (event.event) {
      case 'accepted':
        told.requestId = event.accepted.requestId;
        break;
      case 'delta':
        process.stdout.write(event.delta.text);
        chunksLeft -= 1;
        break;
      case 'finished':
        told.finishReason = event.finished.finishReason;
        break;
      case 'summary':
        told.usage = event.summary.usage;
        break;
      default: // of a newer server
    }
    if (chunksLeft === 0) return null;
  }
  process.stdout.write('\n');
  return told;
}

const server = connect(values.target, {
  ca: values['ca-certificate'] && readFileSync(values['ca-certificate']),
  apiKey: values['api-key-file'] && readFileSync(values['api-key-file'], 'ascii').trim(),
});
try {
  const told = await (values.stream ? askStream(server) : askOnce(server));
  if (told) process.stdout.write(`${JSON.stringify(told)}\n`);
} catch (error) {
  process.stderr.write(`${grpc.status[error.code] ?? 'ERROR'}: ${error.details ?? error.message}\n`);
  process.exitCode = 1;
} finally {
  server.close();
}

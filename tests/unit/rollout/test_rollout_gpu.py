"""The rollout on a CUDA device: numerics, memory that sleep frees, and weights over CUDA IPC between processes."""

import asyncio
import multiprocessing

import pytest
import torch
from tiny_models import engine, generate, prompt, qwen2, recomputed_log_probs, row, save

from verl_ext_sharding.rollout.modeling import host
from verl_ext_sharding.rollout.server import HFServer
from verl_ext_sharding.rollout.settings import ModelSpec, ServerSettings
from verl_ext_sharding.rollout.transport import WeightReceiver, send_weights
from verl_ext_sharding.rollout.weights import WeightLoader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
SAMPLED = {"temperature": 1.0, "logprobs": True, "seed": 3}


def _serve(connection):
    """A server process: answers the calls of a `PipeEndpoint` on its own model."""
    model = host(qwen2(seed=1).to(CUDA), CUDA).model
    receiver = loader = None
    while (call := connection.recv()) is not None:
        name, *arguments = call
        if name == "begin":
            loader = WeightLoader(model)
            receiver = WeightReceiver(loader, CUDA, *arguments)
            answer = receiver.shares_memory
        elif name == "load":
            answer = receiver.load(*arguments)
        elif name == "finish":
            receiver.close()
            answer = loader.finish()
        else:
            answer = {key: value.cpu() for key, value in model.state_dict().items()}
        connection.send(answer)


class PipeEndpoint:
    """Calls `_serve` over a pipe, one call at a time."""

    def __init__(self, connection, *, refuse_ipc=False):
        self._connection, self._refuse_ipc = connection, refuse_ipc
        self.shared = None

    def call(self, *message):
        self._connection.send(message)
        return self._answer()

    def _answer(self):
        assert self._connection.poll(60)
        return self._connection.recv()

    async def begin(self, handle, proof):
        self.shared = self.call("begin", handle, b"another" if self._refuse_ipc else proof)
        return self.shared

    def load(self, pieces, host_bucket):
        self._connection.send(("load", pieces, None if host_bucket is None else host_bucket.numpy()))

        async def answer():
            self._answer()

        return answer()

    async def finish(self):
        self.call("finish")

    async def cancel(self):
        self.call("finish")


@pytest.fixture
def connection():
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,))
    process.start()
    yield here
    here.send(None)
    process.join(30)


@pytest.mark.parametrize("refuse_ipc", [False, True], ids=["ipc", "host memory"])
@pytest.mark.parametrize("bucket_bytes", [1000, 1 << 20])
def test_weights_reach_another_process_whole(connection, refuse_ipc, bucket_bytes):
    trained = qwen2(seed=3).to(CUDA)
    endpoint = PipeEndpoint(connection, refuse_ipc=refuse_ipc)
    for _ in range(2):
        with torch.no_grad():
            trained.model.norm.weight.add_(1.0)
        asyncio.run(send_weights(trained.state_dict().items(), endpoint, bucket_bytes=bucket_bytes, device=CUDA))
    assert endpoint.shared is not refuse_ipc
    arrived = endpoint.call("state")
    for name, tensor in trained.state_dict().items():
        assert torch.equal(arrived[name], tensor.cpu())


def test_log_probs_equal_a_full_forward_in_fp32():
    model = host(qwen2().to(CUDA), CUDA).model
    target = engine(model, max_num_seqs=4)
    done = generate(target, [row(prompt(3 + 5 * n), seed=n, temperature=0.8, max_tokens=24) for n in range(10)])
    target.close()
    for item in done:
        expected = recomputed_log_probs(model, item, temperature=0.8)
        torch.testing.assert_close(torch.tensor(item.log_probs), expected.cpu(), atol=1e-5, rtol=0)


def test_a_request_keeps_its_tokens_whatever_arrives_first():
    model = host(qwen2().to(CUDA), CUDA).model

    def run(order, places):
        target = engine(model, max_num_seqs=places)
        rows = [row(prompt(3 + n % 7, n), seed=n, top_p=0.95) for n in range(20)]
        generate(target, rows[::order])
        target.close()
        return [item.token_ids for item in rows]

    assert run(1, 20) == run(-1, 3)


def test_sleep_gives_the_devices_memory_back(tmp_path):
    async def scenario():
        settings = ServerSettings(
            model=ModelSpec(path=save(qwen2(), tmp_path, eos=0), dtype="float32"), device="cuda", response_length=8
        )
        server = HFServer(settings)
        await server.start()
        allocated = []
        for step in range(2):
            await server.wake_up(["weights"])
            endpoint = _Direct(server)
            await send_weights(
                qwen2(seed=5).state_dict().items(), endpoint, bucket_bytes=4096, device=torch.device("cpu")
            )
            await server.wake_up(["kv_cache"])
            output = await server.generate(prompt(5), SAMPLED, str(step))
            awake = await server.resident_bytes()
            allocated.append(torch.cuda.memory_allocated())
            await server.sleep()
            asleep = await server.resident_bytes()
            allocated.append(torch.cuda.memory_allocated())
        return output, awake, asleep, allocated

    output, awake, asleep, allocated = asyncio.run(scenario())
    assert len(output.token_ids) == len(output.log_probs) == 8
    assert awake["weight_bytes"] == sum(parameter.nbytes for parameter in qwen2().parameters())
    assert asleep["weight_bytes"] == asleep["kv_cache_bytes"] == 0
    assert allocated[0] - allocated[1] >= awake["weight_bytes"]
    assert allocated[3] <= allocated[1]  # a second round leaves no more behind than the first


class _Direct:
    """Calls a server's methods in this process, through host memory."""

    def __init__(self, server):
        self._server = server

    def begin(self, handle, proof):
        return self._server.begin_weights_update(handle, proof)

    def load(self, pieces, host_bucket):
        return self._server.load_weights_bucket(pieces, host_bucket.clone().numpy())

    def finish(self):
        return self._server.finish_weights_update()

    def cancel(self):
        return self._server.cancel_weights_update()

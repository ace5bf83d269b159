"""The steps of start-up: reads and checks artifacts, shares memory, builds engines (`service.repository.startup`).

Each step reports all problems of all artifacts at once. Building takes seconds: do it before serving, or on another
thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from model.spec import golden, golden_origin, golden_texts
from model.spec.artifact import (
    CHAT,
    DECODER,
    ENCODER,
    GOLDEN,
    GOLDEN_TEXTS,
    MAX_CHAT_BYTES,
    TARGET_TOKENIZER,
    TOKENIZER,
    ArtifactError,
    Manifest,
    load,
    stamp,
)
from model.spec.artifact import Device as BuiltFor
from model.spec.chat import Chat, ChatSettings
from model.spec.reading import read_text
from model.spec.tokenizer import Tokenizer, TokenizerError
from service.config import Admission, Kernels, ServeConfig
from service.engine.engine import Engine, LastRun
from service.engine.factory import build_engine
from service.engine.kv.budget import MemoryNeeds, graph_weight_bytes, memory_needs
from service.engine.kv.process_memory import available_memory, memory_limit, resident_bytes
from service.engine.sampling.grammar import Vocabulary
from service.engine.scheduler import EngineLimits
from service.engine.sessions.cuda_provider import cuda_free_bytes
from service.engine.sessions.session import SessionOptions
from service.engine.types import Device
from service.errors import StartupError
from service.forecasting.admission import PATIENCE_SECONDS
from service.process import grammar_check
from service.repository.devices import artifact_folder, choose_device, model_folders
from service.repository.kv_pool import KVPool
from service.repository.memory_plan import PROCESS_BYTES, MemoryPlan, in_units, model_memory, plan_memory
from service.repository.models import ServedModel

_LOGGER = logging.getLogger(__name__)
# Of the models that are there; by the tokenizer's file, what the model adds to it, and its ends.
_VOCABULARIES: WeakValueDictionary[tuple[str, int, tuple[int, ...]], Vocabulary] = WeakValueDictionary()

_Item = TypeVar("_Item")
_Loaded = TypeVar("_Loaded")


def load_models(folder: Path, device: Device = Device.AUTO) -> tuple[ServedModel, ...]:
    """Loads every artifact below `folder` as `load_model` does; a subfolder's name is its model's.

    Raises:
        StartupError: listing all that is wrong with any of them.
    """
    subfolders = model_folders(folder)
    if not subfolders:
        raise StartupError([f"{folder} has no subfolder, and so no model to serve"])
    return _load_all(subfolders, lambda subfolder: load_model(subfolder, device))


def settle_device(config: ServeConfig) -> ServeConfig:
    """The configuration with the device that computes, instead of `AUTO`.

    Raises:
        StartupError: when a model is not exported for it, or it does not work.
    """
    return dataclasses.replace(config, device=choose_device(config.device, model_folders(config.models)))


def model_names(folder: Path) -> tuple[str, ...]:
    """The models that `folder` has now, served or not.

    Raises:
        StartupError: when it cannot be read.
    """
    return tuple(subfolder.name for subfolder in model_folders(folder))


def needs_of(manifest: Manifest, config: ServeConfig) -> MemoryNeeds:
    """The memory that serving an artifact takes; on a CPU as the memory plan counts it."""
    needs = memory_needs(manifest, config.max_batch_size, config.chunk_tokens)
    if manifest.device is BuiltFor.CUDA:
        return needs
    memory = model_memory(manifest, config.max_batch_size, config.chunk_tokens)
    return dataclasses.replace(needs, besides=memory.besides)


def check_room(manifest: Manifest, config: ServeConfig, num_bytes: int, promised: int) -> None:
    """Refuses to load a model beside others if memory is too short, before any of it is taken.

    Weights count twice: until the engine is proven, a copy of their file lies beside them, which the kernel cannot drop
    as it drops cached files. The memory of a CUDA device was checked when the model took its part.

    Args:
        manifest: the model's.
        config: the server's.
        num_bytes: that it takes when its K/V are full, without K/V that it shares with the engine that it replaces.
        promised: that all engines which are there take when their K/V are full; most may be untouched as yet.

    Raises:
        StartupError: with the bytes that it needs and the bytes that are left.
    """
    limit = _limit(config)
    if limit is None or manifest.device is BuiltFor.CUDA:
        return
    copied = sum(graph_weight_bytes(manifest, graph) for graph in (DECODER, ENCODER) if graph in manifest.graphs)
    needed, resident, taken = copied + num_bytes, resident_bytes(), PROCESS_BYTES + promised
    left = max(0, limit - max(resident, taken))
    if needed > left:
        # Where more is in use already, fewer K/V may not help.
        hint = f"; a server with {needed + taken - limit} bytes fewer of K/V (--kv-memory) has room"
        raise StartupError(
            [
                f"loading it needs up to {needed} bytes of memory, of {limit} there are {left} left beside what is "
                f"served and its K/V{hint if taken >= resident else ''}"
            ]
        )


def _limit(config: ServeConfig) -> int | None:
    """Bytes that this process can ever have."""
    return memory_limit() if config.memory is None else config.memory


def share_memory(models: Iterable[ServedModel], config: ServeConfig) -> KVPool:
    """Deals out the K/V memory to the models that are served from the start.

    Without `kv_memory` every model gets all rows at full length, or all of them share what memory has room for.

    Raises:
        StartupError: when memory is not enough for all of them, with the numbers.
    """
    models = tuple(models)
    needs = {model.name: needs_of(model.manifest, config) for model in models}
    shares = dict(config.kv_shares)
    if not any(model.manifest.device is BuiltFor.CUDA for model in models):
        plan = _plan_on_cpu(models, config)
        num_bytes = plan.kv_bytes if plan.is_cut else config.kv_memory
        limit = _limit(config)
        return KVPool(num_bytes, shares, None if limit is None else max(0, limit - PROCESS_BYTES), needs)
    if config.memory is not None:
        raise StartupError(["--memory is for models on a CPU; on a GPU --kv-memory sets the bytes of K/V"])
    free_bytes = cuda_free_bytes()
    besides = sum(need.besides for need in needs.values())
    room = free_bytes - besides
    if room <= 0:
        raise StartupError([f"weights and steps need {besides} bytes of the device's memory, there are {free_bytes}"])
    num_bytes = config.kv_memory
    # A device's K/V are reserved at once: all memory that is left is a better default than a refusal.
    if num_bytes is None and sum(need.whole for need in needs.values()) > room:
        num_bytes = room
    return KVPool(num_bytes, shares, free_bytes, needs)


def _plan_on_cpu(models: Iterable[ServedModel], config: ServeConfig) -> MemoryPlan:
    """The memory plan, logged. What the operator sets is refused only where memory can never hold it."""
    manifests = {model.name: model.manifest for model in models}
    available = available_memory() if config.memory is None else config.memory
    memory = available if config.kv_memory is None else _limit(config)
    plan = plan_memory(manifests, config.max_batch_size, config.chunk_tokens, memory, config.kv_memory)
    if not manifests:
        return plan
    if config.memory is not None and (limit := memory_limit()) is not None and config.memory > limit:
        _LOGGER.warning("--memory is %s, more than the %s that there are", in_units(config.memory), in_units(limit))
    # A large model's weights are most of it, so that this line says why K/V are what they are.
    _LOGGER.info(
        "memory: %s once K/V are full, of %s available: K/V %s, pre-faulted %s; %s",
        in_units(plan.peak),
        "unknown" if available is None else in_units(available),
        in_units(plan.kv_bytes),
        in_units(plan.prefaulted),
        plan.describe(),
    )
    if config.kv_memory is None and plan.is_cut:
        _LOGGER.warning(
            "K/V get %s, as %d rows at full length would take %s: fewer long requests run at once; --kv-memory sets it",
            in_units(plan.kv_bytes),
            plan.max_batch_size,
            in_units(plan.whole_kv),
        )
    elif available is not None and plan.peak > available:
        _LOGGER.warning("%s of memory are available, less than --kv-memory asks for", in_units(available))
    return plan


def build_engines(
    folder: Path,
    models: Iterable[ServedModel],
    config: ServeConfig,
    last_run: LastRun | None = None,
    kv_memory: Mapping[str, int] | None = None,
    *,
    is_serving: bool = False,
) -> dict[str, Engine]:
    """Loads every model's graphs, reserves its K/V and, with speculation, proves that it changes no bits.

    `last_run` is shared by all engines that one thread steps, `kv_memory` by default as `share_memory` deals it out.
    With `is_serving` the process serves other models and must survive files that are truncated meanwhile: a copy of the
    weights is held until the engines are proven.

    Raises:
        StartupError: listing all that is wrong with any of them.
    """
    limits = EngineLimits(
        max_batch_size=config.max_batch_size,
        prefill_chunk=config.chunk_tokens,
        max_prefill_tokens=config.chunk_tokens,
        patience_seconds=PATIENCE_SECONDS if config.admission is Admission.DEADLINE else None,
        look_up=config.look_up,
    )
    shared = LastRun() if last_run is None else last_run
    options = SessionOptions(
        intra_op_threads=config.threads or 0,
        allow_spinning=config.spin,
        copies_weights=is_serving,
        own_kernels=config.kernels is Kernels.AUTO,
    )
    models = tuple(models)
    parts = share_memory(models, config).parts if kv_memory is None else kv_memory

    def build(model: ServedModel) -> tuple[str, Engine]:
        own = artifact_folder(folder / model.name, config.device)
        engine = build_engine(
            own,
            model.manifest,
            model.output_tokenizer.decode,
            dataclasses.replace(limits, kv_memory_bytes=parts[model.name]),
            options,
            shared,
            config.device,
        )
        # The files that were loaded are those that were checked.
        if model.stamp and model.stamp != stamp(own, model.manifest):
            raise StartupError([f"{own}: its files have changed while it was loaded"])
        # Not with the golden cases: while the engine thread replays those, streams of other models stand still.
        engine.prove_merged_chunks(model.golden_cases)
        if config.look_up:
            engine.prove_speculation(model.golden_cases)
        return model.name, engine

    return dict(_load_all(models, build))


def load_model(folder: Path, device: Device = Device.AUTO) -> ServedModel:
    """Reads and checks one artifact, all but its graphs; the folder's name is the model's.

    `device` `AUTO` is the one that the artifact is for.

    Raises:
        StartupError: listing all that is wrong with it.
    """
    manifest = manifest_of(folder, device)
    name, folder = folder.name, artifact_folder(folder, device)
    before = stamp(folder, manifest)
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as beside:
        # Checksums want a core, not the interpreter. Wrong ones outrank whatever reading finds.
        checksums = beside.submit(_load, folder, device)
        try:
            return dataclasses.replace(_read(name, folder, manifest), stamp=before)
        finally:
            checksums.result()


def manifest_of(folder: Path, device: Device) -> Manifest:
    """The manifest of an artifact whose files are all there, regular, and of the right sizes; checksums are not read.

    Raises:
        StartupError: listing every problem, wrong checksums among them.
    """
    folder = artifact_folder(folder, device)
    try:
        return _load(folder, device, checksums=False)
    except StartupError:
        _load(folder, device)
        raise


def _load(folder: Path, device: Device, *, checksums: bool = True) -> Manifest:
    devices = tuple(BuiltFor) if device is Device.AUTO else (BuiltFor(device),)
    try:
        return load(folder, devices, checksums=checksums, memory_bytes=memory_limit())
    except ArtifactError as error:
        raise StartupError([f"{folder}: {problem}" for problem in error.problems]) from error


def _read(name: str, folder: Path, manifest: Manifest) -> ServedModel:
    """Everything but the graphs; raises StartupError with all problems."""
    problems: list[str] = []
    prompt = _load_tokenizer(folder / TOKENIZER, _prompt_vocab_size(manifest), problems)
    output = prompt
    if TARGET_TOKENIZER in manifest.files:
        output = _load_tokenizer(folder / TARGET_TOKENIZER, manifest.config.vocab_size, problems)
    try:
        cases = golden.load(folder / GOLDEN, manifest.config)
    except ValueError as error:
        problems.append(f"{folder}: {error}")
        cases = ()
    chat = _load_chat(folder / CHAT, prompt, problems) if CHAT in manifest.files and prompt is not None else None
    if not problems and prompt is not None and output is not None:
        try:
            problems += [f"{folder}: {each}" for each in golden_texts.check(folder, manifest, prompt, output)]
        except (OSError, ValueError) as error:
            problems.append(f"{folder / GOLDEN_TEXTS}: {error}")
    if not problems:
        try:
            problems += [f"{folder}: {each}" for each in golden_origin.check(folder, manifest)]
        except ValueError as error:
            problems.append(f"{folder}: {error}")
    if problems or prompt is None or output is None:
        raise StartupError(problems)
    return ServedModel(
        name=name,
        manifest=manifest,
        prompt_tokenizer=prompt,
        output_tokenizer=output,
        golden_cases=cases,
        chat=chat,
        vocabulary=_shared_vocabulary(name, output, manifest),
    )


def _shared_vocabulary(name: str, tokenizer: Tokenizer, manifest: Manifest) -> Vocabulary | None:
    """The vocabulary of a tokenizer's file. Models that have the same share it, as those before and after a reload.

    A large one takes half a second with the interpreter's lock, in which streams stand still, and tens of megabytes.
    """
    file = manifest.files[TARGET_TOKENIZER if TARGET_TOKENIZER in manifest.files else TOKENIZER]
    key = file.sha256, manifest.config.vocab_size, manifest.eos_ids
    vocabulary = _VOCABULARIES.get(key)
    if vocabulary is None and (vocabulary := _vocabulary(name, tokenizer, manifest)) is not None:
        _VOCABULARIES[key] = vocabulary
    return vocabulary


def _vocabulary(name: str, tokenizer: Tokenizer, manifest: Manifest) -> Vocabulary | None:
    """The vocabulary of structured output, if that is possible. Made here: llguidance holds the interpreter's lock."""
    if not grammar_check.is_available():
        return None
    try:
        return Vocabulary(tokenizer, manifest.config.vocab_size, manifest.eos_ids)
    except TokenizerError as error:
        _LOGGER.info("%s has no structured output: %s", name, error)
        return None


def _prompt_vocab_size(manifest: Manifest) -> int:
    config = manifest.config
    return config.source_vocab_size if config.is_encoder_decoder else config.vocab_size


def _load_tokenizer(path: Path, vocab_size: int, problems: list[str]) -> Tokenizer | None:
    try:
        tokenizer = Tokenizer.load(path)
    except TokenizerError as error:
        problems.append(str(error))
        return None
    if tokenizer.vocab_size > vocab_size:
        problems.append(f"{path} has {tokenizer.vocab_size} tokens, the model knows {vocab_size}")
    return tokenizer


def _load_chat(path: Path, tokenizer: Tokenizer, problems: list[str]) -> Chat | None:
    try:
        return Chat(ChatSettings.from_json(read_text(path, MAX_CHAT_BYTES)), tokenizer)
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {error}")
        return None


def _load_all(items: Iterable[_Item], load_one: Callable[[_Item], _Loaded]) -> tuple[_Loaded, ...]:
    """Loads each item; raises StartupError with the problems of all of them."""
    loaded: list[_Loaded] = []
    problems: list[str] = []
    for item in items:
        try:
            loaded.append(load_one(item))
        except StartupError as error:
            problems += error.problems
    if problems:
        raise StartupError(problems)
    return tuple(loaded)

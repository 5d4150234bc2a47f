"""What a job file may contain, asked of the pydantic models: known keys, accepted values, places of stray keys."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from elastic_train.config.job import Job
from elastic_train.config.section import Section

FOREIGN_KEYS = {
    "gradient_accumulation_steps": "is derived from training.global_batch, training.micro_batch and the data ranks",
    "accumulate_grad_batches": "is derived from training.global_batch, training.micro_batch and the data ranks",
    "gradient_accumulation": "is derived from training.global_batch, training.micro_batch and the data ranks",
    "num_epochs": "use training.steps; one epoch is (samples / training.global_batch) steps",
    "num_train_epochs": "use training.steps; one epoch is (samples / training.global_batch) steps",
    "epochs": "use training.steps; one epoch is (samples / training.global_batch) steps",
    "max_epochs": "use training.steps; one epoch is (samples / training.global_batch) steps",
    "max_steps": "use training.steps",
    "train_iters": "use training.steps",
    "num_steps": "use training.steps",
    "lr": "use optimizer.learning_rate",
    "max_lr": "use optimizer.learning_rate",
    "lr_scheduler_type": "use schedule.name",
    "warmup": "use schedule.warmup_steps",
    "warmup_ratio": "use schedule.warmup_steps, a number of optimizer steps",
    "max_grad_norm": "use optimizer.clip_norm",
    "clip_grad": "use optimizer.clip_norm",
    "gradient_clip_val": "use optimizer.clip_norm",
    "batch_size": "use training.global_batch (sequences per step) and training.micro_batch (sequences per slot)",
    "train_batch_size": "use training.global_batch",
    "global_batch_size": "use training.global_batch",
    "micro_batch_size": "use training.micro_batch",
    "per_device_train_batch_size": "use training.micro_batch",
    "train_micro_batch_size_per_gpu": "use training.micro_batch",
    "seq_len": "use data.sequence_length",
    "seq_length": "use data.sequence_length",
    "max_seq_length": "use data.sequence_length",
    "bf16": "use training.precision",
    "fp16": "use training.precision",
    "dtype": "use training.precision",
    "tensor_parallel_size": "use parallel.tp",
    "tensor_model_parallel_size": "use parallel.tp",
    "pipeline_parallel_size": "use parallel.pp",
    "pipeline_model_parallel_size": "use parallel.pp",
    "context_parallel_size": "use parallel.cp",
    "zero_stage": "use parallel.data: ddp for stage 0, zero1, zero2 or zero3",
    "zero_optimization": "use parallel.data: ddp for stage 0, zero1, zero2 or zero3",
    "deepspeed": "use parallel.data: ddp for stage 0, zero1, zero2 or zero3",
    "use_distributed_optimizer": "use parallel.data: zero1 is Megatron's distributed optimizer",
    "fsdp": "use parallel.data: zero3 (full_shard; reshard_after_forward=false: shard_grad_op) or hsdp (hybrid_shard)",
    "fsdp_config": "use parallel.data, parallel.reshard_after_forward, parallel.prefetch and parallel.offload",
    "sharding_strategy": "use parallel.data: zero3 (FULL_SHARD; reshard_after_forward=false: SHARD_GRAD_OP) or hsdp",
    "cpu_offload": "use parallel.offload",
    "offload_optimizer": "use parallel.offload",
    "offload_param": "use parallel.offload",
    "fp8": "use training.precision",
    "mixed_precision": "use training.precision and training.reduce_dtype",
    "grad_reduce_in_fp32": "use training.reduce_dtype",
    "peft_config": "use lora",
    "r": "use lora.rank",
    "lora_r": "use lora.rank",
    "lora_rank": "use lora.rank",
    "lora_alpha": "use lora.alpha",
    "targets": "use lora.target_modules",
    "lora_target_modules": "use lora.target_modules",
    "dropout": "is not available: what it leaves out would depend on the layout",
    "lora_dropout": "is not available: what it leaves out would depend on the layout",
    "num_workers": "use hosts.min and hosts.max",
    "num_gpus": "use hosts.min and hosts.max",
    "save_steps": "use checkpoint.every_steps",
    "save_interval": "use checkpoint.every_steps",
    "save_total_limit": "use checkpoint.keep_last",
    "output_dir": "use storage.uri",
    "checkpoint_dir": "use storage.uri",
    "max_failures": "use failure.max_errors",
    "n_layers": "use model.num_hidden_layers",
    "num_layers": "use model.num_hidden_layers",
    "n_heads": "use model.num_attention_heads",
    "num_heads": "use model.num_attention_heads",
}
"""Names that other tools use, in lower case with underscores, and what to write here."""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class a field holds, or None for a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def leaf_paths(section: type[Section] = Job, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all plain values of a job file."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield prefix + name
        else:
            yield from leaf_paths(inner, f"{prefix}{name}.")


def unknown_keys(data: Mapping[str, Any], section: type[Section] = Job, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, sentence) of every key that no section knows."""
    for key, value in data.items():
        field = section.model_fields.get(key)
        if field is None:
            yield prefix + key, _advice(key, section, prefix)
            continue
        inner = section_of(field)
        if inner is not None and isinstance(value, Mapping):
            yield from unknown_keys(value, inner, f"{prefix}{key}.")
        elif inner is not None and isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from unknown_keys(item, inner, f"{prefix}{key}.{number}.")


def _advice(key: str, section: type[Section], prefix: str) -> str:
    path, plain = prefix + key, key.lower().replace("-", "_")
    if plain in section.model_fields:
        return f"{path}: unknown key; did you mean {prefix}{plain}?"
    if plain in FOREIGN_KEYS:
        return f"{path}: unknown key; {_foreign(plain)}"
    homes = [leaf for leaf in leaf_paths() if leaf.rsplit(".", 1)[-1] == plain]
    if len(homes) == 1:
        parent = homes[0].rpartition(".")[0]
        return f"{path}: belongs {f'under {parent}' if parent else 'at the top level'}: {homes[0]}"
    if plain in Job.model_fields:
        return f"{path}: belongs at the top level: {plain}"
    siblings = difflib.get_close_matches(plain, section.model_fields, n=1, cutoff=0.7)
    if siblings:
        return f"{path}: unknown key; did you mean {prefix}{siblings[0]}?"
    by_name = {leaf.rsplit(".", 1)[-1]: leaf for leaf in leaf_paths()}
    elsewhere = difflib.get_close_matches(plain, by_name, n=1, cutoff=0.8)
    if elsewhere:
        return f"{path}: unknown key; did you mean {by_name[elsewhere[0]]}?"
    where = f"under {prefix[:-1]}" if prefix else "at the top level"
    return f"{path}: unknown key; accepted {where}: {', '.join(section.model_fields)}"


def _foreign(plain: str) -> str:
    hint = FOREIGN_KEYS[plain]
    return f"{plain} {hint}" if hint.startswith("is ") else hint


def accepted(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A phrase for the values a field takes, e.g. ``an integer of at least 1 or 'auto'``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return accepted(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(accepted(argument, metadata if argument is not type(None) else ()) for argument in arguments)
    if origin is Literal:
        return " or ".join(repr(value) if isinstance(value, str) else str(value) for value in arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return f"a list, each {accepted(arguments[0])}"
    if origin is dict:
        return f"a mapping of {accepted(arguments[0])} to {accepted(arguments[1])}"
    if origin is tuple:
        kinds = {accepted(argument) for argument in arguments}
        return f"a list of {len(arguments)} values, each {' or '.join(sorted(kinds))}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a mapping with the keys {', '.join(annotation.model_fields)}"
    noun = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return " ".join(filter(None, (noun.get(annotation, str(annotation)), _bounds(metadata))))


def _bounds(metadata: list[Any] | tuple[Any, ...]) -> str:
    phrases = []
    for item in _flat(metadata):
        if isinstance(item, annotated_types.Ge):
            phrases.append(f"of at least {item.ge}")
        elif isinstance(item, annotated_types.Gt):
            phrases.append(f"greater than {item.gt}")
        elif isinstance(item, annotated_types.Le):
            phrases.append(f"at most {item.le}")
        elif isinstance(item, annotated_types.Lt):
            phrases.append(f"below {item.lt}")
    return " and ".join(phrases)


def _flat(metadata: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item

"""Rules of thumb: a profile of a transformer of which only counts are known. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.memory.profile import ModelProfile, Moment, OptimizerProfile, ParameterProfile, Stretch, Timeline

__all__ = ["OPTIMIZER_STATE", "profile_of_config", "profile_of_counts"]

#: Bytes of state per parameter element in float32, of optimizers that people name.
OPTIMIZER_STATE = {
    "adamw": 8,
    "adam": 8,
    "sgd": 0,
    "sgd-momentum": 4,
    "adagrad": 4,
    "rmsprop": 4,
    "adafactor": 0,
    "lion": 4,
}

#: Bytes of (parameter, gradient, master weight, computed value) per element.
_PRECISIONS = {"fp32": (4, 4, 0, 4), "bf16": (4, 4, 0, 2), "fp16": (4, 4, 0, 2), "pure-bf16": (2, 2, 4, 2)}

#: Operations that one block's forward starts, of an eager implementation.
_OPERATIONS = 30


def profile_of_counts(
    *,
    parameters: float,
    layers: int,
    hidden: int,
    sequence: int = 2048,
    vocabulary: int = 32000,
    heads: int | None = None,
    intermediate: int | None = None,
    tied: bool = False,
    precision: str = "fp32",
    optimizer: str = "adamw",
    flash: bool = True,
    name: str = "counts",
) -> ModelProfile:
    """A profile of a decoder of equal blocks, by rules of thumb.

    Activations of a block are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equation 1, with the width
    of the MLP as it is; attention scores are left out where a fused attention doesn't keep them. Operations are 2 per parameter and token in forward and 4 in
    backward, plus attention.

    Args:
        parameters: Number of parameters in all.
        layers: Number of blocks.
        hidden: Width.
        sequence: Tokens per sample.
        vocabulary: Rows of the embedding.
        heads: Attention heads; None: of 128 each.
        intermediate: Width of the MLP; None: four times ``hidden``.
        tied: Whether embedding and head are one matrix.
        precision: "fp32", "bf16", "fp16", "pure-bf16".
        optimizer: A name of `OPTIMIZER_STATE`.
        flash: Whether attention is computed without keeping its scores.
        name: What it is called.

    Raises:
        ConfigurationError: If a name isn't known, or the embedding alone has more parameters.

    Example:
        >>> profile = profile_of_counts(parameters=7e9, layers=32, hidden=4096)
        >>> round(profile.parameter_count / 1e9, 2), round(profile.optimizer.state / 1e9), len(profile.units)
        (7.0, 56, 33)
    """
    if precision not in _PRECISIONS or optimizer.lower() not in OPTIMIZER_STATE:
        raise ConfigurationError(
            f"Rules of thumb know the precisions {', '.join(_PRECISIONS)} and the optimizers {', '.join(OPTIMIZER_STATE)}, not {precision!r} with "
            f"{optimizer!r}. Trace the model itself: --model."
        )
    itemsize, grad, master, compute = _PRECISIONS[precision]
    outside = vocabulary * hidden * (1 if tied else 2)
    per_layer = (parameters - outside) / layers
    if per_layer <= 0:
        raise ConfigurationError(
            f"{parameters:.3g} parameters are fewer than the {outside:.3g} of embedding and head ({vocabulary} x {hidden}): say --vocabulary or --tied."
        )
    rows = max(1, round(per_layer / hidden))
    held = [ParameterProfile(name="embedding", shape=(vocabulary, hidden), itemsize=itemsize)]
    if not tied:
        held.append(ParameterProfile(name="head", shape=(vocabulary, hidden), itemsize=itemsize))
    held += [
        ParameterProfile(name=f"layers.{i}", shape=(rows, hidden), itemsize=itemsize, unit=i + 1) for i in range(layers)
    ]
    count = sum(p.numel for p in held)
    state = count * (OPTIMIZER_STATE[optimizer.lower()] + master)
    sizes = _Sizes(
        layers=layers,
        token=hidden * sequence,
        rows=rows * hidden,
        logits=sequence * vocabulary,
        scores=0 if flash else (heads or max(1, hidden // 128)) * sequence**2,
        attention=4 * sequence**2 * hidden,
        sequence=sequence,
        mlp=(intermediate or 4 * hidden) * sequence,
        outside=outside if tied else outside // 2,
        compute=compute,
        grad=grad,
        copies=compute if compute < itemsize else 0,
    )
    kinds: dict[str, Mapping[str, Any] | None] = {"none": None, "all": {}}
    return ModelProfile(
        name=name,
        parameters=tuple(held),
        units=("", *(f"layers.{i}" for i in range(layers))),
        optimizer=OptimizerProfile(
            name=optimizer,
            state=state,
            temporaries=2 * max(p.numel for p in held) * 4,
            temporaries_alone=2 * max(p.numel for p in held) * 4,
            temporaries_at_once=count * 4,
            operations=15,
        ),
        timelines={k: Timeline(stretches=sizes.stretches(again=k == "all"), recompute=v) for k, v in kinds.items()},
        inputs=2 * 8 * sequence,
        precision=precision,
        compute_itemsize=compute,
        traced=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Element counts of one sample's tensors, and what they make of a step."""

    layers: int
    token: int
    rows: int
    logits: int
    scores: int
    attention: int
    sequence: int
    mlp: int
    outside: int
    compute: int
    grad: int
    copies: int

    def stretches(self, *, again: bool) -> tuple[Stretch, ...]:
        """Forward through all blocks and the head, and back; with ``again``, blocks keep their inputs alone."""
        return (
            self._embedding(),
            *(self._forward(i, again) for i in range(self.layers)),
            *self._head(again),
            *(self._backward(i, again) for i in reversed(range(self.layers))),
        )

    @property
    def _embedded(self) -> float:
        return float(self.token * self.compute)

    @property
    def _inside(self) -> float:
        """Bytes that a block makes. Korthikanti et al. count 34 per token and hidden unit with 16-bit values: 18 apart from the MLP's own 4-fold wide ones."""
        return (18 * self.token + 4 * self.mlp + 5 * self.scores) * (self.compute / 2)

    def _kept(self, again: bool) -> float:
        return self._embedded if again else self._inside

    @property
    def _block_flops(self) -> float:
        return 2.0 * self.rows * self.sequence + self.attention

    def _embedding(self) -> Stretch:
        moment = Moment(per_sample=self._embedded)
        return Stretch(phase="forward", unit=0, peaks=(moment,), end=moment, operations=3)

    def _forward(self, block: int, again: bool) -> Stretch:
        copied = self.copies * self.rows
        copies = copied * (0 if again else block + 1)
        before = self._embedded + self._kept(again) * block
        return Stretch(
            phase="forward",
            unit=block + 1,
            peaks=(Moment(per_sample=before + self._inside, copies=copies or copied),),
            end=Moment(per_sample=before + self._kept(again), copies=copies),
            flops=self._block_flops,
            moved=2 * self._inside,
            operations=_OPERATIONS,
        )

    def _head(self, again: bool) -> tuple[Stretch, Stretch]:
        """Forward and backward of what follows the blocks."""
        copies = self.copies * self.rows * (0 if again else self.layers) + self.copies * self.outside
        flops = 2.0 * self.outside * self.sequence
        logits = self.logits * (self.compute + 4.0)
        full = self._embedded + self._kept(again) * self.layers
        gradients = self.outside * self.grad
        there = Moment(per_sample=full + logits, copies=copies)
        fullest = Moment(per_sample=full + logits + self.logits * 4.0, copies=copies, gradients=gradients)
        after = Moment(per_sample=full + self._embedded, copies=copies, gradients=gradients)
        return (
            Stretch(phase="forward", unit=0, peaks=(there,), end=there, flops=flops, moved=2 * logits, operations=8),
            Stretch(
                phase="backward",
                unit=0,
                peaks=(fullest,),
                end=after,
                flops=2 * flops,
                moved=3 * logits,
                operations=12,
            ),
        )

    def _backward(self, block: int, again: bool) -> Stretch:
        copied = self.copies * self.rows
        before = self._embedded + self._kept(again) * block
        gradients = self.outside * self.grad + (self.layers - block) * self.rows * self.grad
        inside = self._inside + 2 * self._embedded + 2 * self.mlp * self.compute
        return Stretch(
            phase="backward",
            unit=block + 1,
            peaks=(
                Moment(per_sample=before + inside, copies=copied * (1 if again else block + 1), gradients=gradients),
            ),
            end=Moment(per_sample=before + self._embedded, copies=0 if again else copied * block, gradients=gradients),
            flops=self._block_flops * (3 if again else 2),
            moved=(3 + 2 * again) * self._inside,
            operations=_OPERATIONS * (3 if again else 2),
        )


def profile_of_config(path: str | Path, **settings: Any) -> ModelProfile:
    """A profile by rules of thumb of a transformer that a ``config.json`` describes, in the vocabulary of the Hugging Face hub.

    Args:
        path: The file, or its directory.
        **settings: As of `profile_of_counts`; they go before the file.

    Raises:
        ConfigurationError: If it isn't such a file.

    Example:
        >>> import json, tempfile
        >>> facts = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4, "intermediate_size": 256}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "config.json").write_text(json.dumps(facts))
        ...     profile_of_config(folder, sequence=32).parameter_count
        104960
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} can't be read as a model's configuration: {error}") from error
    facts = {**facts, **facts.get("text_config", {})}

    def of(*names: str, default: int | None = None) -> int:
        found = next((facts[n] for n in names if facts.get(n) is not None), default)
        if found is None:
            raise ConfigurationError(f"{file} has no {names[0]}: it describes no transformer that rules of thumb know.")
        return int(found)

    layers, hidden = of("num_hidden_layers", "n_layer", "num_layers"), of("hidden_size", "n_embd", "d_model")
    heads = of("num_attention_heads", "n_head", "num_heads", default=max(1, hidden // 128))
    vocabulary = of("vocab_size")
    mlp = of("intermediate_size", "n_inner", "ffn_dim", "d_ff", default=4 * hidden)
    head_size = of("head_dim", default=hidden // heads)
    keys = of("num_key_value_heads", default=heads)
    gated = (
        str(facts.get("hidden_act", "")).lower() in ("silu", "swish", "swiglu") or facts.get("model_type") == "gemma"
    )
    experts = of("num_local_experts", "num_experts", "n_routed_experts", default=1)
    wide = of("moe_intermediate_size", default=mlp) if experts > 1 else mlp
    attention = hidden * head_size * (2 * heads + 2 * keys)
    block = attention + experts * (3 if gated else 2) * hidden * wide + 2 * hidden
    tied = bool(facts.get("tie_word_embeddings", True))
    given = {
        "parameters": block * layers + vocabulary * hidden * (1 if tied else 2),
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocabulary": vocabulary,
        "intermediate": mlp,
        "tied": tied,
        "sequence": of("max_position_embeddings", "n_positions", default=2048),
        "name": str(facts.get("model_type") or file.resolve().parent.name),
    }
    return profile_of_counts(**{**given, **{k: v for k, v in settings.items() if v is not None}})

"""What learners of a policy and its critic have in common: optimizer, schedules, state, a check for divergence."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from learning.networks import Policy, action_mask
from learning.recurrent import RecurrentPolicy

BETAS = (0.9, 0.999)  # of Adam: its default ones
Columns = TypeVar("Columns", bound="tuple[Any, ...]")
Loss = Callable[..., tuple[Tensor, ...]]
_log = logging.getLogger(__name__)


class Diverged(FloatingPointError):
    """A loss or a gradient is not finite, and the networks are unusable."""


class UnusableBatch(ValueError):
    """A batch has values that are not finite, or an action mask that allows no action; nothing was learnt from it."""


@dataclass(eq=False, repr=False)
class ActorCritic(ABC):
    """Trains a policy and its critic with one Adam optimizer.

    Args:
        policy: trained in place.
        critic: observations ``[*B, obs]`` to values ``[*B]``, in scaled reward; trained in place.
        gamma: discount per step.
        reward_scale: factor on rewards before anything is computed from them, so that returns are of the order of one.
        epochs: passes over each batch, at most; at the start.
        epochs_final: the same, after `anneal_frames` frames; it falls linearly in between.
        minibatch_size: frames per gradient step, at most. The frames of one environment in one batch stay together for
            a recurrent policy and for IMPALA: at least one such sequence is a minibatch.
        lr: learning rate of Adam, at the start.
        lr_end_factor: the learning rate at the end of the schedule, as a fraction of `lr`.
        anneal_frames: length of the schedules; after it the final values stay.
        value_coef: weight of the value loss, which is half the mean of the squared errors.
        entropy_coef: weight of the entropy bonus.
        max_grad_norm: the gradient is scaled down to this norm, over all parameters.
        adam_eps: Adam's epsilon.
        compile: run the gradient step by ``torch.compile``, which takes seconds before the first one. Where it fails, a
            warning says why, and the step runs without. None: not, unless the steps that ``train.py`` plans repay it.

    Attributes:
        frames: learnt from so far; the position in the schedules.
        stopping: set when the run is told to stop: the signal may have ended the compiler too, of which nothing warns.
        after_epoch: called by ``update`` after each pass over a batch but the last one, if it is set.
        parameters: those of both networks that are trained, each once.

    Raises:
        ValueError: a count below 1.
    """

    policy: Policy | RecurrentPolicy
    critic: nn.Module
    _: KW_ONLY
    gamma: float = 0.99
    reward_scale: float = 1.0
    epochs: int = 10
    epochs_final: int | None = None
    minibatch_size: int = 256
    lr: float = 3e-4
    lr_end_factor: float = 1.0
    anneal_frames: int = 100_000
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5
    compile: bool | None = None

    def __post_init__(self) -> None:
        last = self.epochs if self.epochs_final is None else self.epochs_final
        if min(self.epochs, last, self.minibatch_size, self.anneal_frames) < 1:
            raise ValueError("epochs, epochs_final, minibatch_size and anneal_frames must be at least 1")
        self.frames, self.stopping = 0, False
        self.after_epoch: Callable[[], object] | None = None
        unique = dict.fromkeys((*self.policy.parameters(), *self.critic.parameters()))  # a shared trunk is listed once
        self.parameters = [p for p in unique if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=self.lr, eps=self.adam_eps, fused=True)
        self._join_state()
        self._compiled: Callable[..., tuple[Tensor, ...]] | None = None
        if self.compile:
            torch._dynamo.config.trace_autograd_ops = True  # the gradient is a part of what is compiled
            torch.compiler.reset()  # an earlier learner of this process would be taken for this one, changed
            # Without the layout optimization: a convolution of a changing number of images is compiled wrongly.
            self._compiled = torch.compile(self._step, fullgraph=True, options={"layout_optimization": False})

    def _join_state(self) -> None:
        """Make the optimizer's state views of three vectors, which a gradient step updates as wholes."""
        states = [self.optimizer.state[p] for p in self.parameters]
        for p, state in zip(self.parameters, states, strict=True):
            if not state:  # before the first step
                state |= {"step": torch.zeros((), device=p.device), "exp_avg": p.new_zeros(p.shape)}
                state["exp_avg_sq"] = p.new_zeros(p.shape)
        self._moments = {name: torch.cat([one[name].flatten() for one in states]) for name in states[0]}
        for name, vector in self._moments.items():
            parts = vector.split([one[name].numel() for one in states])
            for state, part in zip(states, parts, strict=True):
                state[name] = part.view_as(state[name])

    @abstractmethod
    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from one batch ``[*B, T]`` of a collector (time last); return statistics.

        Where a batch has a bool "mask" ``[*B, T]``, only its true entries are frames.

        Raises:
            Diverged: a loss, the gradient or a parameter is not finite; the networks are unusable.
            UnusableBatch: the batch cannot be learnt from; the networks are unchanged.
        """

    def _epochs(self, count: int) -> Iterator[None]:
        """Yield once for each pass over a batch; between two passes, call ``after_epoch`` with finite parameters."""
        for number in range(count):
            if number and self.after_epoch is not None:
                if not all(bool(one.isfinite().all()) for one in self.parameters):
                    self._raise_diverged(f"a parameter is not finite after {number} of {count} passes over a batch")
                self.after_epoch()
            yield

    def _scheduled(self, first: float, final: float | None) -> float:
        """Return the value, after ``frames``, that falls linearly from `first` to `final` over ``anneal_frames``."""
        final = first if final is None else final
        return final + max(0.0, 1.0 - self.frames / self.anneal_frames) * (first - final)

    def _begin_update(self, batch: TensorDictBase) -> tuple[float, int]:
        """Check `batch`; set the scheduled learning rate; return it, and the scheduled number of passes."""
        check_finite(batch)
        allowed = action_mask(batch.get("observation"))
        if allowed is not None:
            actions = self.policy.actions if isinstance(self.policy, RecurrentPolicy) else self.policy
            frames, possible = batch.get("mask", None), actions.can_act(allowed)
            impossible = int((~possible if frames is None else frames & ~possible).sum())
            if impossible:
                raise UnusableBatch(f"the action mask allows no action in {impossible} frames: check the environment")
        lr = self._scheduled(self.lr, self.lr * self.lr_end_factor)
        self.optimizer.param_groups[0]["lr"] = lr
        return lr, round(self._scheduled(self.epochs, self.epochs_final))

    def _descend(
        self, loss: Loss, columns: Any, shape: Sequence[int], lr: float, epochs: int, *limits: float
    ) -> list[tuple[Tensor, ...]]:
        """Do the gradient steps of `epochs` passes over `columns`; return what `_step` returned for each.

        `loss` maps a minibatch and the `limits` to the loss, means over its frames, and others. The columns have
        `shape` (sequences, and frames of each). A pass takes the sequences in random order, in as few minibatches as
        ``minibatch_size`` allows; their sizes differ by one at most.
        """
        sequences, device = shape[0], self.parameters[0].device
        count = max(1, math.ceil(sequences / max(1, self.minibatch_size // math.prod(shape[1:]))))
        sizes = [(sequences + i) // count for i in range(count)]
        settings = [torch.tensor(x, dtype=torch.float64, device=device) for x in (lr, *limits)]
        passes = (torch.randperm(sequences, device=device).split(sizes) for _ in self._epochs(epochs))
        return [self._run_step(loss, columns, rows, *settings) for minibatches in passes for rows in minibatches]

    def _run_step(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Do `_step`, compiled if that is wanted and possible."""
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except Exception as error:  # noqa: BLE001  (the tracer's, a compiler's; one of the step itself comes again)
                self._compiled, said = None, f"{type(error).__name__}: {error}".strip().partition("\n")[0]
                if not self.stopping:
                    _log.warning("the gradient step is not compiled, and runs as it is: %s", said)
        return self._step(*arguments)

    def _step(self, loss: Loss, columns: Any, rows: Tensor, lr: Tensor, *limits: Tensor) -> tuple[Tensor, ...]:
        """Do one step of Adam on the minibatch `rows` of `columns`, in place; return the statistics of `loss`.

        The norm of the gradient is added to their means. This is the function that is compiled.
        """
        value, means, *others = loss(each(columns, lambda column: column[rows]), *limits)
        gradients = torch.autograd.grad(value, self.parameters, materialize_grads=True)
        with torch.no_grad():
            gradient, moments = torch.cat([one.flatten() for one in gradients]), self._moments
            norm = gradient.norm()
            gradient *= (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            count, first, second = moments["step"].add_(1), moments["exp_avg"], moments["exp_avg_sq"]
            first.lerp_(gradient, 1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            bias = [1 - beta ** count[0].double() for beta in BETAS]
            change = lr / bias[0] * first / ((second / bias[1]).sqrt() + self.adam_eps)
            parts = change.split([p.numel() for p in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.sub_(part.view_as(parameter))
        return torch.cat([means, norm.unsqueeze(0)]), *others

    def _check_diverged(self, stats: dict[str, float]) -> None:
        """Raise Diverged if a loss or the norm of the gradient is not finite."""
        needed = ("loss_policy", "loss_value", "grad_norm")
        if wrong := [f"{name} is {stats[name]}" for name in needed if not math.isfinite(stats[name])]:
            self._raise_diverged(", ".join(wrong))

    def _raise_diverged(self, reason: str) -> NoReturn:
        raise Diverged(
            f"{type(self).__name__} diverged after {self.frames} frames: {reason}; resume from an earlier checkpoint, "
            f"or start again, with a learning rate (algorithm.lr) below {self.lr:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed learner needs: both networks, the optimizer, the position in the schedules."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "frames": self.frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was taken, with the same networks and this learner's hyperparameters."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        (group,) = self.optimizer.param_groups
        own = {name: value for name, value in group.items() if name != "params"}
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0].update(own)
        self._join_state()
        self.frames = state["frames"]


def each(columns: Columns, function: Callable[[Any], Any]) -> Columns:
    """Apply `function` to each column that is not None."""
    kind: Any = type(columns)
    return kind(*(None if one is None else function(one) for one in columns))


def as_sequences(x: Tensor, dimensions: int) -> Tensor:
    """Return `x` ``[*B, T, ...]``, where B and T have so many `dimensions`, as ``[n, T, ...]``."""
    return x.flatten(0, dimensions - 2) if dimensions > 1 else x.unsqueeze(0)


def kl_divergence(log_ratio: Tensor) -> Tensor:
    """Estimate KL(old ‖ new) in nats from log(new/old) at old's actions: "k3" of http://joschu.net/blog/kl-approx.html."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def explained_variance(error_variance: Tensor, target: Tensor) -> Tensor:
    """Return 1 - Var(target - prediction) / Var(target); `error_variance` is the numerator."""
    return 1.0 - error_variance / target.var(correction=0).clamp_min(1e-8)


def check_finite(batch: TensorDictBase) -> None:
    """Raise UnusableBatch if an observation or a reward of a frame of `batch` is not finite."""
    mask = batch.get("mask", None)
    for name, values in batch.select("observation", ("next", "reward")).flatten_keys().items():
        if values.is_floating_point() and not values.isfinite().all():
            wrong = ~values.isfinite().reshape(*batch.shape, -1).all(-1)
            if (wrong if mask is None else wrong & mask).any():
                where = wrong.nonzero()[0].tolist()  # the last index is the step
                raise UnusableBatch(f"{name} is not finite at {where} of the batch: check the environment")

"""Small learners, and experience of a bandit for them."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

from collectors.environments.specs import Spec
from learning import MLP, make_actor_critic

CHOICE = Spec(torch.Size([3]), torch.int64, n=3)
TORQUES = Spec(torch.Size([2]), torch.float32, torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 10.0]))
L = TypeVar("L")


def learner_of(kind: Callable[..., L], spec: Spec = CHOICE, seed: int = 0, **options: Any) -> L:
    torch.manual_seed(seed)
    observation = Spec(torch.Size([4]), torch.float32)
    return kind(*make_actor_critic(partial(MLP, hidden=(8, 8)), observation, spec), **options)


def four_numbers(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, 4)


def batch_of(acting: Any, *batch: int, seed: int = 0, observe: Callable[..., Any] = four_numbers) -> TensorDict:
    """Experience of a policy: the larger the action, the better."""
    torch.manual_seed(seed)
    with torch.no_grad():
        td = acting(TensorDict({"observation": observe(*batch)}, batch_size=batch))
    end = torch.ones(*batch, 1, dtype=torch.bool)
    outcome = {
        "observation": observe(*batch),
        "reward": td["action"].float().reshape(*batch, -1).sum(-1, keepdim=True),
        "terminated": end,
        "truncated": ~end,
        "done": end.clone(),
    }
    return td.set("next", TensorDict(outcome, batch_size=batch))

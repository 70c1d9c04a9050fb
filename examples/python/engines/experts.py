"""Experts that are easy to check: expert e multiplies its input by ``factor(e)``."""

import torch


def factor(experts):
    """For any tensor of expert numbers: 1, 1.25, 1.5, 1.75, 2, 1, ... exact in bfloat16."""
    return 1 + 0.25 * (experts % 5)


def expected(x, topk_idx, topk_weights):
    """The layer's output for one rank's tokens, in float32."""
    share = torch.where(topk_idx >= 0, topk_weights * factor(topk_idx), 0.0)
    return x.float() * share.sum(dim=1, keepdim=True)


def random_numbers(function, rows, columns, generator):
    """The same on GPUs as on the CPU, where the generator is; they lie on the default device."""
    numbers = function(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
    return numbers.to(torch.get_default_device())


def random_tokens(buffer, tokens, hidden, num_experts, num_topk, seed):
    """x ``[tokens, hidden]`` bfloat16, topk_idx ``[tokens, num_topk]``, topk_weights float32; the last selection is left out."""
    generator = torch.Generator().manual_seed(1000 * seed + buffer.rank)
    x = random_numbers(torch.randn, tokens, hidden, generator).to(torch.bfloat16)
    scores = random_numbers(torch.rand, tokens, num_experts, generator)
    topk_weights, topk_idx = scores.topk(num_topk, dim=1)
    topk_idx = topk_idx.clone()
    topk_idx[:, -1] = -1
    return x, topk_idx, topk_weights.contiguous()


def require_close(actual, wanted, tolerance=0.02):
    """Sums are rounded to bfloat16 once a rank, and once at the end."""
    difference = ((actual.float() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
    assert difference < tolerance, f"relative difference {difference}, allowed: {tolerance}"
    return difference

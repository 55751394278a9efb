"""Parts of documents, and attention to them, during attention with a mask."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from megatron_lancet.features.documents.lengths import Documents, Part, attend_by_document
from megatron_lancet.model.attention import sdpa
from megatron_lancet.patching import replaced
from tests.small_gpt import transformer_config

HEADS, GROUPS, KEY, VALUE = 4, 2, 6, 5
SAMPLES = ((5, 1, 3, 7), (2, 14), (16,))


def masked(inputs, samples):
    """Attention [s, b, n * v] to a document's earlier positions, by a mask; queries are the last positions."""
    query, key, value = inputs
    num_positions, first = key.size(0), key.size(0) - query.size(0)
    of_document = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in samples])
    allowed = (of_document[:, :, None] == of_document[:, None])[:, :num_positions, :num_positions].tril()
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    context = scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None, first:], enable_gqa=True)
    return context.permute(2, 0, 1, 3).flatten(2)


def tensors(first, stop, samples=SAMPLES, value_channels=VALUE):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    num = len(samples)
    return (
        random(stop - first, num, HEADS, KEY),
        random(stop, num, GROUPS, KEY),
        random(stop, num, GROUPS, value_channels),
    )


def attention(samples):
    """Our core attention, and the documents of ``samples``."""
    from megatron.core.transformer.enums import AttnMaskType

    config = transformer_config(num_query_groups=GROUPS)
    core = sdpa.SdpaAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=KEY**-0.5)
    return core, Documents(samples)


def test_positions_restart():
    found = Documents(((2, 1, 3), (6,))).positions()
    assert found.T.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]


def test_parts_of_documents_between_positions():
    documents = Documents(((2, 1, 3), (6,)))
    assert documents.parts(1, 4) == [[Part(0, 0, 1, 2), Part(1, 2, 2, 3), Part(2, 3, 3, 4)], [Part(0, 0, 1, 4)]]
    assert documents.parts(2, 3) == [[Part(1, 2, 2, 3)], [Part(0, 0, 2, 3)]]
    assert documents.longest == 6


def test_bounds_count_what_precedes_a_part():
    bounds = Documents(((2, 1, 3), (6,))).bounds(1, 4, torch.device("cpu"))
    assert bounds.query_ends.tolist() == [0, 1, 2, 3, 6]
    assert bounds.key_ends.tolist() == [0, 2, 3, 4, 8]
    assert (bounds.most_queries, bounds.most_keys) == (3, 4)
    assert bounds.query_ends.dtype == bounds.key_ends.dtype == torch.int32


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_parts_of_all_chunks_are_all_positions_once(lengths, data):
    documents, num = Documents((tuple(lengths),)), sum(lengths)
    cuts = sorted({0, num, *data.draw(st.sets(st.integers(0, num), max_size=4))})
    parts = [part for first, stop in pairwise(cuts) for part in documents.parts(first, stop)[0]]
    assert [position for part in parts for position in range(part.first, part.stop)] == list(range(num))
    starts = [0, *accumulate(lengths)]
    assert all(part.start == starts[part.document] for part in parts)


@pytest.mark.parametrize("samples", [SAMPLES, (SAMPLES[0],) * 3])
@pytest.mark.parametrize(("first", "stop"), [(0, 16), (0, 7), (7, 12), (12, 16)])
def test_attention_by_document_equals_attention_with_a_mask(one_rank, samples, first, stop):
    core, documents = attention(samples)
    inputs = tensors(first, stop)
    found = attend_by_document(documents, *inputs, attend=core._attend_with_mask)
    expected = masked(inputs, samples)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    pairs = (torch.autograd.grad(output, inputs, grad) for output in (found, expected))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs)


def varlen_reference(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What torch documents of its kernel: each sequence by itself, causal, aligned at the last query and key."""
    assert window_size == (-1, 0)
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert key.shape[-1] == value.shape[-1] == query.shape[-1]
    parts = []
    for q, k, v in zip(
        *(t.tensor_split(cu[1:-1].tolist()) for t, cu in ((query, cu_q), (key, cu_k), (value, cu_k))), strict=True
    ):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        context = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        parts.append(context.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(("first", "stop"), [(0, 16), (0, 7), (7, 12)])
@pytest.mark.parametrize("value_channels", [VALUE, KEY])
@pytest.mark.parametrize("takes_groups", [True, False])
def test_one_kernel_for_all_documents_gets_what_it_documents(one_rank, first, stop, value_channels, takes_groups):
    core, documents = attention(SAMPLES)
    inputs = tensors(first, stop, value_channels=value_channels)
    with replaced(sdpa, "varlen_attn", varlen_reference), replaced(sdpa, "_KERNEL_TAKES_GROUPS", takes_groups):
        found = core._attend_to_documents(*inputs, documents=documents)
    torch.testing.assert_close(found, masked(inputs, SAMPLES))


def test_the_kernel_takes_these_arguments(one_rank):
    """Shapes and types on the meta device, where torch checks the call and computes nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    core, documents = attention(SAMPLES)
    with FakeTensorMode():
        inputs = [tensor.detach().bfloat16() for tensor in tensors(7, 12)]
        found = core._attend_to_documents(*inputs, documents=documents)
    assert found.shape == (5, len(SAMPLES), HEADS * VALUE)

"""What lancet evaluate says of a training that kept documents apart."""

import argparse

import pytest

from megatron_lancet.inference.evaluate import note_on_documents


@pytest.mark.parametrize("flag", ["dataloader_inter_document_masking", "reset_attention_mask"])
def test_windows_with_several_documents_have_a_note(flag):
    arguments = {"dataloader_inter_document_masking": False, "reset_attention_mask": False}
    assert note_on_documents(argparse.Namespace()) is None
    assert note_on_documents(argparse.Namespace(**arguments)) is None
    note = note_on_documents(argparse.Namespace(**{**arguments, flag: True}))
    assert note is not None
    assert note.startswith(f"training had --{flag.replace('_', '-')}; here tokens also see earlier documents")
